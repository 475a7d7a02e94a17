/* What comes in over a rank's TCP connections: heads, segments that go straight to where they belong, and words. */
#define _GNU_SOURCE
#include "tcp.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

void taccl_tcp_finish(struct links *s, struct incoming *message)
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
            taccl_tcp_say(s, word->link, OPEN, word->number);
        else
            taccl_tcp_open(s, s->gated[word->number]);
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
    int64_t number = taccl_tcp_number(s, link);
    if (message->sized && taccl_tcp_used(message->into, message->room) != message->arrived) {
        taccl_tcp_fail(s, DAMAGED, number, 0, 0);
        return;
    }
    if (!message->sized && message->arrived != message->room) {
        taccl_tcp_fail(s, SHORT, number, 0, 0);
        return;
    }
    message->landed = s->run;
    taccl_tcp_finish(s, message);
}

void taccl_tcp_look(struct links *s, struct link *link)
{
    uint32_t words[2];
    uint64_t bytes;
    memcpy(words, link->head, sizeof words);
    memcpy(&bytes, link->head + sizeof words, sizeof bytes);
    bytes = le64toh(bytes);
    uint32_t word = le32toh(words[0]), run = le32toh(words[1]), ahead = run - (uint32_t)s->run;
    int64_t number = taccl_tcp_number(s, link), tag = word / KINDS;
    enum kind kind = word % KINDS;
    if (ahead) {
        if (ahead >= UINT32_C(1) << 31) {
            taccl_tcp_fail(s, OTHER_RUN, number, run, s->run);
            return;
        }
        link->early = 1;
        taccl_tcp_want(s, link, EPOLLIN, 0);
        return;
    }
    link->head_bytes = 0;
    if (kind == SEGMENT || kind == LAST) {
        struct incoming *message = tag < link->messages->receives_end ? link->messages->receives[tag] : NULL;
        if (!message || !has_room(s, message, bytes)) {
            taccl_tcp_fail(s, OTHER_BYTES, number, (int64_t)bytes, tag);
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
        taccl_tcp_fail(s, OTHER_WORD, number, tag, 0);
        return;
    }
    if (kind == OPEN) {
        taccl_tcp_open(s, message);
        return;
    }
    message->ready = s->run;
    taccl_tcp_go(s, message);
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
        taccl_tcp_look(s, link);
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

void taccl_tcp_read(struct links *s, struct link *link)
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
            taccl_tcp_lose(s, link, errno);
            return;
        }
        if (!got) {
            taccl_tcp_lose(s, link, ENDED);
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
