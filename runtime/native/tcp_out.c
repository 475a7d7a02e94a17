/* What goes out over a rank's TCP connections: messages that may go, words, and who is next. */
#define _GNU_SOURCE
#include "tcp.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

/* Not 0: the time of the monotonic clock. Tests set it. */
int64_t taccl_still_ns;

int64_t taccl_tcp_now_ns(void)
{
    struct timespec now;
    if (taccl_still_ns)
        return taccl_still_ns;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
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
        taccl_tcp_fail(s, CROWDED, message->link, 0, 0);
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

static void pop(struct links *s, struct link *link)
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
    s->drained += !link->work;
}

static int waits(const struct links *s, const struct outgoing *message)
{
    return message->gates > 0 && (message->open_run != s->run || message->open < message->gates);
}

void taccl_tcp_go(struct links *s, struct outgoing *message)
{
    int wanted = message->eager || message->ready == s->run;
    if (message->begun_in == s->run && wanted && !waits(s, message))
        push(s, message);
}

void taccl_tcp_open(struct links *s, struct outgoing *message)
{
    int waited = waits(s, message);
    message->open = message->open_run == s->run ? message->open + 1 : 1;
    message->open_run = s->run;
    if (waited)
        taccl_tcp_go(s, message);
}

void taccl_tcp_say(struct links *s, int64_t number, enum kind kind, int64_t tag)
{
    struct link *link = s->links + number;
    if (link->lost)
        return;
    if (link->words_bytes + HEAD > link->messages->words_room) {
        taccl_tcp_fail(s, CROWDED, number, 0, 0);
        return;
    }
    write_head(link->messages->words + link->words_bytes, tag, kind, s->run, 0);
    link->words_bytes += HEAD;
    if (!link->talking) {
        link->talking = 1;
        s->talking[s->talkings++] = number;
    }
}

int taccl_tcp_under_way(const struct link *link)
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
        pop(s, link);
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
    if (taccl_tcp_under_way(link))
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
int64_t taccl_tcp_write(struct links *s, struct link *link, int64_t segments)
{
    int64_t handed = 0;
    while (!link->lost) {
        if (!taccl_tcp_under_way(link) && segments && link->work) {
            segments--;
            handed += lay_segment(s, link);
        }
        if (!taccl_tcp_under_way(link) && link->words_bytes)
            lay_words(link);
        if (!taccl_tcp_under_way(link)) {
            taccl_tcp_want(s, link, EPOLLOUT, 0);
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
            taccl_tcp_want(s, link, EPOLLOUT, 1);
            return handed;
        } else if (errno != EINTR) {
            taccl_tcp_lose(s, link, errno);
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
void taccl_tcp_hand_over(struct links *s)
{
    for (int64_t i = 0; i < s->talkings; i++) {
        struct link *link = s->links + s->talking[i];
        link->talking = 0;
        taccl_tcp_write(s, link, 0);
    }
    s->talkings = s->due_ns = 0;
    while (s->sendings) {
        int64_t now = taccl_tcp_now_ns(), due = 0, kept = 0;
        struct link *goes = NULL;
        for (int64_t i = 0; i < s->sendings; i++) {
            struct link *link = s->links + s->sending[i];
            if (!link->work || link->lost) {
                link->sending = 0;
                continue;
            }
            s->sending[kept++] = s->sending[i];
            if (taccl_tcp_under_way(link))
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
        int64_t handed = taccl_tcp_write(s, goes, goes->messages->uplink_count ? 1 : s->most_segments);
        take_uplinks(s, goes->messages, handed, now);
    }
}
