/* A rank's TCP connections: what goes out over them, and what comes in.
 *
 * What Links (runtime/tcp_links.py), Link (runtime/tcp_link.py) and their messages (runtime/tcp_messages.py) do in
 * Python, where the reasons stand: the same bytes pass over the connections, and the same is asked of the kernel.
 * Messages are registered once. A run is a call for each message when it is started, and one for each look at all
 * connections. Every length that a peer says is checked before anything is written.
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum kind { SEGMENT, LAST, READY, OPEN, KINDS };
enum { HEAD = 16 };     /* bytes before a segment, and of a message of frames, where they say its length */
enum { EVENTS = 64 };   /* of one look */
enum { ENDED = -1 };    /* instead of an errno */
enum state { FINE, LOST, WRONG }; /* what a caller is told */
/* What is wrong; as FAULTS in runtime/tcp_native.py. */
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
    struct outgoing **gated;
    int64_t gated_count;
    int64_t *free_ns;                       /* clocks of uplinks (runtime/uplink.py), which ranks share */
    int64_t queue_ns, most_ns;
    int64_t reads, most_segments, wake_bytes, frame_bytes, orderly_bytes;
    int64_t pacing;                         /* the option for a rate of bytes in a second */
    int64_t lost;                           /* the first link that was, or -1 */
    int64_t fault, fault_link, fault_first, fault_second;
};

const int64_t taccl_outgoing_bytes = sizeof(struct outgoing), taccl_word_bytes = sizeof(struct word),
              taccl_incoming_bytes = sizeof(struct incoming), taccl_uplink_bytes = sizeof(struct uplink),
              taccl_messages_bytes = sizeof(struct messages), taccl_link_bytes = sizeof(struct link),
              taccl_links_bytes = sizeof(struct links);

/* Not 0: the time of the monotonic clock. Tests set it. */
int64_t taccl_still_ns;

static int64_t now_ns(void)
{
    struct timespec now;
    if (taccl_still_ns)
        return taccl_still_ns;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void fail(struct links *s, enum fault fault, int64_t link, int64_t first, int64_t second)
{
    if (s->fault)
        return;
    s->fault = fault;
    s->fault_link = link;
    s->fault_first = first;
    s->fault_second = second;
}

static int64_t number_of(const struct links *s, const struct link *link)
{
    return link - s->links;
}

static void lose(struct links *s, struct link *link, int64_t why)
{
    if (link->lost)
        return;
    link->lost = why;
    epoll_ctl((int)s->poller, EPOLL_CTL_DEL, (int)link->fd, NULL);
    if (s->lost < 0)
        s->lost = number_of(s, link);
}

static void want(struct links *s, struct link *link, int64_t what, int wanted)
{
    int64_t wants = wanted ? link->wants | what : link->wants & ~what;
    if (wants == link->wants)
        return;
    struct epoll_event event = {.events = (uint32_t)wants, .data.fd = (int)link->fd};
    link->wants = wants;
    epoll_ctl((int)s->poller, EPOLL_CTL_MOD, (int)link->fd, &event);
}

/* The length that a message of frames says it has; -1: it is damaged. */
static int64_t used_bytes(const uint8_t *message, int64_t room)
{
    uint64_t words[2];
    if (room < HEAD)
        return -1;
    memcpy(words, message, sizeof words);
    uint64_t used = le64toh(words[0]);
    if ((used ^ le64toh(words[1])) != UINT64_MAX || used < HEAD || used > (uint64_t)room)
        return -1;
    return (int64_t)used;
}

static void write_head(uint8_t *to, int64_t tag, enum kind kind, int64_t run, int64_t bytes)
{
    uint32_t words[2] = {htole32((uint32_t)(tag * KINDS + kind)), htole32((uint32_t)run)};
    uint64_t length = htole64((uint64_t)bytes);
    memcpy(to, words, sizeof words);
    memcpy(to + sizeof words, &length, sizeof length);
}

/* Which messages go, and in which order. */

static int before(const struct outgoing *one, const struct outgoing *other)
{
    return one->place < other->place;
}

static void push(struct links *s, struct outgoing *message)
{
    struct link *link = s->links + message->link;
    struct outgoing **heap = link->messages->heap;
    if (link->work >= link->messages->most_work) {
        fail(s, CROWDED, message->link, 0, 0);
        return;
    }
    int64_t at = link->work++;
    for (; at && before(message, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = message;
    if (!link->sending) {
        link->sending = 1;
        s->sending[s->sendings++] = message->link;
    }
}

static void pop(struct link *link)
{
    struct outgoing **heap = link->messages->heap, *last = heap[--link->work];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < link->work; at = child) {
        if (child + 1 < link->work && before(heap[child + 1], heap[child]))
            child++;
        if (!before(heap[child], last))
            break;
        heap[at] = heap[child];
    }
    heap[at] = last;
}

static int waits(const struct links *s, const struct outgoing *message)
{
    return message->gates > 0 && (message->open_run != s->run || message->open < message->gates);
}

static void go(struct links *s, struct outgoing *message)
{
    int wanted = message->eager || message->ready == s->run;
    if (message->begun_in == s->run && wanted && !waits(s, message))
        push(s, message);
}

static void open_gate(struct links *s, struct outgoing *message)
{
    int waited = waits(s, message);
    message->open = message->open_run == s->run ? message->open + 1 : 1;
    message->open_run = s->run;
    if (waited)
        go(s, message);
}

static void say(struct links *s, int64_t number, enum kind kind, int64_t tag)
{
    struct link *link = s->links + number;
    if (link->lost)
        return;
    if (link->words_bytes + HEAD > link->messages->words_room) {
        fail(s, CROWDED, number, 0, 0);
        return;
    }
    write_head(link->messages->words + link->words_bytes, tag, kind, s->run, 0);
    link->words_bytes += HEAD;
    if (!link->talking) {
        link->talking = 1;
        s->talking[s->talkings++] = number;
    }
}

/* Outwards. */

static int under_way(const struct link *link)
{
    return link->out_at < link->out_bytes || link->part_bytes;
}

/* Lay out what is to be said. */
static void lay_words(struct link *link)
{
    memcpy(link->messages->out, link->messages->words, (size_t)link->words_bytes);
    link->out_at = 0;
    link->out_bytes = link->words_bytes;
    link->words_bytes = 0;
}

/* A message of so many bytes begins. */
static void limit(const struct links *s, struct link *link, int64_t bytes)
{
    const struct messages *known = link->messages;
    uint64_t most = bytes > known->unlimited_bytes ? (uint64_t)known->bytes_per_s : UINT64_MAX;
    if (most == link->rate)
        return;
    link->rate = most;
    setsockopt((int)link->fd, SOL_SOCKET, (int)s->pacing, &most, sizeof most);
}

/* Behind words, a segment of the message that goes next; its bytes. */
static int64_t lay_segment(struct links *s, struct link *link)
{
    lay_words(link);
    struct outgoing *message = link->messages->heap[0];
    if (message->left == message->count)
        limit(s, link, message->left);
    int64_t most = link->messages->segment_bytes, bytes = message->left < most ? message->left : most;
    link->part = message->data + (message->count - message->left);
    link->part_bytes = bytes;
    message->left -= bytes;
    if (!message->left)
        pop(link);
    write_head(link->messages->out + link->out_bytes, message->tag, message->left ? SEGMENT : LAST, s->run, bytes);
    link->out_bytes += HEAD;
    link->now = message;
    link->flags = s->frame_bytes < bytes && bytes <= s->orderly_bytes ? MSG_EOR : 0;
    return bytes;
}

static void took(struct links *s, struct link *link, int64_t bytes)
{
    int64_t said = link->out_bytes - link->out_at;
    said = bytes < said ? bytes : said;
    link->out_at += said;
    link->part += bytes - said;
    link->part_bytes -= bytes - said;
    if (under_way(link))
        return;
    struct outgoing *message = link->now;
    link->now = NULL;
    link->flags = 0;
    if (message && !message->left) {
        message->done = 1;
        s->news++;
    }
}

/* Hand to the kernel what it takes: what is laid out, words, and at most so many segments more. The bytes of these. */
static int64_t write_out(struct links *s, struct link *link, int64_t segments)
{
    int64_t handed = 0;
    while (!link->lost) {
        if (!under_way(link) && segments && link->work) {
            segments--;
            handed += lay_segment(s, link);
        }
        if (!under_way(link) && link->words_bytes)
            lay_words(link);
        if (!under_way(link)) {
            want(s, link, EPOLLOUT, 0);
            return handed;
        }
        struct iovec parts[2] = {
            {link->messages->out + link->out_at, (size_t)(link->out_bytes - link->out_at)},
            {(void *)(uintptr_t)link->part, (size_t)link->part_bytes},
        };
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t taken = sendmsg((int)link->fd, &message, (int)link->flags | MSG_NOSIGNAL);
        if (taken >= 0) {
            took(s, link, taken);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            want(s, link, EPOLLOUT, 1);
            return handed;
        } else if (errno != EINTR) {
            lose(s, link, errno);
        }
    }
    return handed;
}

/* When a segment may leave over all uplinks of a link. */
static int64_t due_ns(const struct links *s, const struct messages *known, int64_t now)
{
    int64_t due = now;
    for (int64_t i = 0; i < known->uplink_count; i++) {
        int64_t at = __atomic_load_n(s->free_ns + known->uplinks[i].number, __ATOMIC_RELAXED);
        at = (at < now + s->most_ns ? at : now + s->most_ns) - s->queue_ns;
        due = at > due ? at : due;
    }
    return due;
}

static void take_uplinks(const struct links *s, const struct messages *known, int64_t bytes, int64_t now)
{
    for (int64_t i = 0; i < known->uplink_count; i++) {
        const struct uplink *uplink = known->uplinks + i;
        int64_t *cell = s->free_ns + uplink->number, at = __atomic_load_n(cell, __ATOMIC_RELAXED);
        at = at > now ? at : now;
        at = at < now + s->most_ns ? at : now + s->most_ns;
        __atomic_store_n(cell, at + bytes * INT64_C(1000000000) / uplink->bytes_per_s, __ATOMIC_RELAXED);
    }
}

/* Words first, then segments of what may go, in the order of the program, as long as uplinks are free soon. */
static void hand_over(struct links *s)
{
    for (int64_t i = 0; i < s->talkings; i++) {
        struct link *link = s->links + s->talking[i];
        link->talking = 0;
        write_out(s, link, 0);
    }
    s->talkings = s->due_ns = 0;
    while (s->sendings) {
        int64_t now = now_ns(), due = 0, kept = 0;
        struct link *goes = NULL;
        for (int64_t i = 0; i < s->sendings; i++) {
            struct link *link = s->links + s->sending[i];
            if (!link->work || link->lost) {
                link->sending = 0;
                continue;
            }
            s->sending[kept++] = s->sending[i];
            if (under_way(link))
                continue;
            int64_t at = due_ns(s, link->messages, now);
            if (at > now)
                due = due && due < at ? due : at;
            else if (!goes || before(link->messages->heap[0], goes->messages->heap[0]))
                goes = link;
        }
        s->sendings = kept;
        s->due_ns = due;
        if (!goes)
            return;
        /* What is known of no uplink goes as far as the kernel takes it. */
        int64_t handed = write_out(s, goes, goes->messages->uplink_count ? 1 : s->most_segments);
        take_uplinks(s, goes->messages, handed, now);
    }
}

/* Inwards. */

static void finish(struct links *s, struct incoming *message)
{
    if (message->landed != s->run || message->started != s->run)
        return;
    if (message->into != message->data) {
        memcpy(message->data, message->into, (size_t)message->arrived);
        message->into = message->data;
    }
    message->arrived = message->told = 0;
    message->done = 1;
    s->news++;
}

/* Whether the next segment belongs to this message. */
static int has_room(const struct links *s, struct incoming *message, uint64_t bytes)
{
    if (message->landed == s->run || bytes > (uint64_t)(message->room - message->arrived))
        return 0;
    if (message->started != s->run) {
        if (!message->eager)
            return 0;
        if (!message->arrived)
            message->into = message->early;
    }
    return 1;
}

static void tell(struct links *s, struct incoming *message)
{
    while (message->told < message->word_count && message->arrived >= message->words[message->told].at_bytes) {
        const struct word *word = message->words + message->told++;
        if (word->link >= 0)
            say(s, word->link, OPEN, word->number);
        else
            open_gate(s, s->gated[word->number]);
    }
}

static void end_segment(struct links *s, struct link *link)
{
    struct incoming *message = link->receiving;
    link->receiving = NULL;
    message->arrived += link->segment;
    tell(s, message);
    if (!link->last)
        return;
    int64_t number = number_of(s, link);
    if (message->sized && used_bytes(message->into, message->room) != message->arrived) {
        fail(s, DAMAGED, number, 0, 0);
        return;
    }
    if (!message->sized && message->arrived != message->room) {
        fail(s, SHORT, number, 0, 0);
        return;
    }
    message->landed = s->run;
    finish(s, message);
}

static void look_at_head(struct links *s, struct link *link)
{
    uint32_t words[2];
    uint64_t bytes;
    memcpy(words, link->head, sizeof words);
    memcpy(&bytes, link->head + sizeof words, sizeof bytes);
    bytes = le64toh(bytes);
    uint32_t word = le32toh(words[0]), run = le32toh(words[1]), ahead = run - (uint32_t)s->run;
    int64_t number = number_of(s, link), tag = word / KINDS;
    enum kind kind = word % KINDS;
    if (ahead) {
        if (ahead >= UINT32_C(1) << 31) {
            fail(s, OTHER_RUN, number, run, s->run);
            return;
        }
        link->early = 1;
        want(s, link, EPOLLIN, 0);
        return;
    }
    link->head_bytes = 0;
    if (kind == SEGMENT || kind == LAST) {
        struct incoming *message = tag < link->messages->receives_end ? link->messages->receives[tag] : NULL;
        if (!message || !has_room(s, message, bytes)) {
            fail(s, OTHER_BYTES, number, (int64_t)bytes, tag);
            return;
        }
        link->receiving = message;
        link->within = message->into + message->arrived;
        link->segment = link->in_bytes = (int64_t)bytes;
        link->last = kind == LAST;
        if (!bytes)
            end_segment(s, link);
        return;
    }
    struct outgoing *message;
    if (kind == READY)
        message = tag < link->messages->sends_end ? link->messages->sends[tag] : NULL;
    else
        message = tag < s->gated_count ? s->gated[tag] : NULL;
    if (!message || bytes || (kind == READY && (message->eager || message->ready == s->run))) {
        fail(s, OTHER_WORD, number, tag, 0);
        return;
    }
    if (kind == OPEN) {
        open_gate(s, message);
        return;
    }
    message->ready = s->run;
    go(s, message);
}

static void take(struct links *s, struct link *link, int64_t got)
{
    if (link->receiving) {
        int64_t data = got < link->in_bytes ? got : link->in_bytes;
        got -= data;
        link->within += data;
        link->in_bytes -= data;
        if (link->in_bytes)
            return;
        end_segment(s, link);
    }
    link->head_bytes += got;
    if (link->head_bytes == HEAD && !s->fault)
        look_at_head(s, link);
}

/* A rank that waits for a long segment sleeps until a good part of it has come. */
static void wake_at(const struct links *s, struct link *link)
{
    int64_t least = link->in_bytes < s->wake_bytes ? link->in_bytes : s->wake_bytes;
    least = least ? least : 1;
    if (least == link->least)
        return;
    link->least = least;
    int bytes = (int)least;
    setsockopt((int)link->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

static void read_in(struct links *s, struct link *link)
{
    if (link->early || link->lost)
        return;
    for (int64_t i = 0; i < s->reads; i++) {
        struct iovec parts[2] = {
            {link->within, (size_t)link->in_bytes},
            {link->head + link->head_bytes, (size_t)(HEAD - link->head_bytes)},
        };
        ssize_t wanted = link->in_bytes + HEAD - link->head_bytes;
        ssize_t got = link->in_bytes ? readv((int)link->fd, parts, 2) : readv((int)link->fd, parts + 1, 1);
        if (got < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                break;
            lose(s, link, errno);
            return;
        }
        if (!got) {
            lose(s, link, ENDED);
            return;
        }
        take(s, link, got);
        if (s->fault)
            return;
        if (got < wanted || link->early)
            break;
    }
    wake_at(s, link);
}

static int state_of(const struct links *s)
{
    return s->fault ? WRONG : s->lost >= 0 ? LOST : FINE;
}

/* The rest is called from Python. */

/* Start a send. Not 0: its length is damaged. */
int taccl_tcp_send(struct links *s, struct outgoing *message)
{
    int64_t count = message->sized ? used_bytes(message->data, message->room) : message->room;
    if (count < 0)
        return 1;
    message->count = message->left = count;
    message->begun_in = s->run;
    go(s, message);
    return 0;
}

void taccl_tcp_receive(struct links *s, struct incoming *message)
{
    message->started = s->run;
    if (message->landed == s->run)
        finish(s, message);
    else if (!message->eager)
        say(s, message->link, READY, message->tag);
}

/* A run has begun, and with it what has come of it already. */
int taccl_tcp_begin(struct links *s)
{
    for (int64_t i = 0; i < s->count; i++) {
        struct link *link = s->links + i;
        if (link->lost || !link->early)
            continue;
        link->early = 0;
        want(s, link, EPOLLIN, 1);
        look_at_head(s, link);
    }
    return state_of(s);
}

/* Move what can be moved. */
int taccl_tcp_move(struct links *s)
{
    struct epoll_event events[EVENTS];
    if (s->fault)
        return WRONG;
    hand_over(s);
    int ready = epoll_wait((int)s->poller, events, EVENTS, 0);
    for (int i = 0; i < ready && !s->fault; i++) {
        int64_t fd = events[i].data.fd, number = fd < s->fds ? s->by_fd[fd] : -1;
        if (number < 0) /* a bell */
            continue;
        struct link *link = s->links + number;
        if (events[i].events & ~(uint32_t)EPOLLOUT)
            read_in(s, link);
        if (events[i].events & EPOLLOUT && !s->fault)
            write_out(s, link, 0);
    }
    if (ready > 0 && !s->fault)
        hand_over(s); /* words that follow from what was read: the rank may sleep next */
    return state_of(s);
}

/* Whether something waits until the kernel takes it. */
int taccl_tcp_owes(const struct links *s)
{
    for (int64_t i = 0; i < s->count; i++)
        if (!s->links[i].lost && (s->links[i].words_bytes || under_way(s->links + i)))
            return 1;
    return 0;
}
