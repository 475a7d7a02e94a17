/* What the files of a rank's TCP connections share: structs that runtime/tcp_native.py has as well, and calls. */
#ifndef TACCL_TCP_H
#define TACCL_TCP_H

#include <stdint.h>

enum kind { SEGMENT, LAST, READY, OPEN, KINDS };
enum { HEAD = 16 };     /* bytes before a segment, and of a message of frames, where they say its length */
enum { EVENTS = 64 };   /* of one look */
enum { ENDED = -1 };    /* instead of an errno */
/* What is wrong; runtime/tcp_native.py has the same numbers, and the words. */
enum fault { NOTHING, OTHER_RUN, OTHER_BYTES, OTHER_WORD, DAMAGED, SHORT, CROWDED };

/* As NativeOutgoing in runtime/tcp_native.py. Runs: numbers, -1 before the first one. */
struct outgoing {
    const uint8_t *data;
    int64_t room, link, tag, place, sized, eager, gates;
    int64_t ready;                          /* the run for which the receiver is ready */
    int64_t open_run, open;                 /* gates that are open, and in which run */
    int64_t begun_in;
    int64_t count, left, done;
};

/* As NativeWord: when so much of a message has come, a gate opens of this rank's message (link -1) or of a peer's. */
struct word {
    int64_t at_bytes, link, number;
};

/* As NativeIncoming. */
struct incoming {
    uint8_t *data, *early, *into;           /* early: where it lands before it is started; into: where it lands */
    int64_t room, link, tag, sized, eager;
    const struct word *words;
    int64_t word_count, told;
    int64_t arrived, started, landed, done;
};

/* As NativeUplink. */
struct uplink {
    int64_t number, bytes_per_s;
};

/* As NativeMessages: those of a program with one peer, by tag, and room for what goes out. */
struct messages {
    struct outgoing **sends, **heap;
    struct incoming **receives;
    int64_t sends_end, receives_end, most_work;
    int64_t segment_bytes, bytes_per_s, unlimited_bytes;
    const struct uplink *uplinks;
    int64_t uplink_count;
    uint8_t *words, *out;
    int64_t words_room;                     /* out has room for a head more */
};

/* As NativeLink. */
struct link {
    int64_t fd, lost, wants, talking, sending;
    struct messages *messages;
    int64_t work;                           /* messages in the heap, which may go, the first in place on top */
    /* What is to be said; what is laid out: words and a head, then a part of the message `now`. */
    int64_t words_bytes, out_at, out_bytes;
    const uint8_t *part;
    int64_t part_bytes;
    struct outgoing *now;
    int64_t flags;
    uint64_t rate;                          /* bytes in a second that the kernel lets pass */
    /* A head that comes, and the segment that follows it. */
    uint8_t head[HEAD];
    int64_t head_bytes;
    uint8_t *within;
    int64_t in_bytes;
    struct incoming *receiving;
    int64_t segment, last;
    int64_t least;                          /* bytes that wake the rank */
    int64_t early;                          /* the head is of a run that has not begun here */
};

/* As NativeState. */
struct links {
    int64_t poller;
    struct link *links;
    int64_t count;
    const int64_t *by_fd;                   /* numbers of links, -1: something else */
    int64_t fds;
    int64_t *talking, *sending;             /* links that have words, or messages that may go */
    int64_t talkings, sendings;
    int64_t run, news, due_ns;
    int64_t drained;                        /* how often a link has got nothing more to carry */
    struct outgoing **gated;
    int64_t gated_count;
    int64_t *free_ns;                       /* clocks of uplinks (runtime/uplink.py), which ranks share */
    int64_t queue_ns, most_ns;
    int64_t reads, most_segments, wake_bytes, frame_bytes, orderly_bytes;
    int64_t pacing;                         /* the option for a rate of bytes in a second */
    int64_t lost;                           /* the first link that was, or -1 */
    int64_t fault, fault_link, fault_first, fault_second;
};

/* tcp.c */
void taccl_tcp_fail(struct links *s, enum fault fault, int64_t link, int64_t first, int64_t second);
int64_t taccl_tcp_number(const struct links *s, const struct link *link);
void taccl_tcp_lose(struct links *s, struct link *link, int64_t why);
void taccl_tcp_want(struct links *s, struct link *link, int64_t what, int wanted);
int64_t taccl_tcp_used(const uint8_t *message, int64_t room);

/* tcp_out.c */
int64_t taccl_tcp_now_ns(void);
void taccl_tcp_go(struct links *s, struct outgoing *message);
void taccl_tcp_open(struct links *s, struct outgoing *message);
void taccl_tcp_say(struct links *s, int64_t number, enum kind kind, int64_t tag);
int taccl_tcp_under_way(const struct link *link);
int64_t taccl_tcp_write(struct links *s, struct link *link, int64_t segments);
void taccl_tcp_hand_over(struct links *s);

/* tcp_in.c */
void taccl_tcp_finish(struct links *s, struct incoming *message);
void taccl_tcp_look(struct links *s, struct link *link);
void taccl_tcp_read(struct links *s, struct link *link);

#endif
