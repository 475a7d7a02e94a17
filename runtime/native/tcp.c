/* A rank's TCP connections: what goes out over them, and what comes in.
 *
 * What Links (runtime/tcp_links.py), Link (runtime/tcp_link.py) and their messages (runtime/tcp_messages.py) do in
 * Python, where the reasons stand: the same bytes pass over the connections, and the same is asked of the kernel.
 * Messages are registered once. A run is a call for each message when it is started, and one for each look at all
 * connections. Every length that a peer says is checked before anything is written.
 */
#define _GNU_SOURCE
#include "tcp.h"

#include <endian.h>
#include <string.h>
#include <sys/epoll.h>

enum { MS = 1000000 };

const int64_t taccl_outgoing_bytes = sizeof(struct outgoing), taccl_word_bytes = sizeof(struct word),
              taccl_incoming_bytes = sizeof(struct incoming), taccl_uplink_bytes = sizeof(struct uplink),
              taccl_messages_bytes = sizeof(struct messages), taccl_link_bytes = sizeof(struct link),
              taccl_links_bytes = sizeof(struct links);

void taccl_tcp_fail(struct links *s, enum fault fault, int64_t link, int64_t first, int64_t second)
{
    if (s->fault)
        return;
    s->fault = fault;
    s->fault_link = link;
    s->fault_first = first;
    s->fault_second = second;
}

int64_t taccl_tcp_number(const struct links *s, const struct link *link)
{
    return link - s->links;
}

void taccl_tcp_lose(struct links *s, struct link *link, int64_t why)
{
    if (link->lost)
        return;
    link->lost = why;
    epoll_ctl((int)s->poller, EPOLL_CTL_DEL, (int)link->fd, NULL);
    if (s->lost < 0)
        s->lost = taccl_tcp_number(s, link);
}

void taccl_tcp_want(struct links *s, struct link *link, int64_t what, int wanted)
{
    int64_t wants = wanted ? link->wants | what : link->wants & ~what;
    if (wants == link->wants)
        return;
    struct epoll_event event = {.events = (uint32_t)wants, .data.fd = (int)link->fd};
    link->wants = wants;
    epoll_ctl((int)s->poller, EPOLL_CTL_MOD, (int)link->fd, &event);
}

/* The length that a message of frames says it has; -1: it is damaged. */
int64_t taccl_tcp_used(const uint8_t *message, int64_t room)
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

/* Whether Python has something to complain of. */
static int troubled(const struct links *s)
{
    return s->fault || s->lost >= 0;
}

/* The rest is called from Python. */

/* Start a send. Not 0: its length is damaged. */
int taccl_tcp_send(struct links *s, struct outgoing *message)
{
    int64_t count = message->sized ? taccl_tcp_used(message->data, message->room) : message->room;
    if (count < 0)
        return 1;
    message->count = message->left = count;
    message->begun_in = s->run;
    taccl_tcp_go(s, message);
    return 0;
}

void taccl_tcp_receive(struct links *s, struct incoming *message)
{
    message->started = s->run;
    if (message->landed == s->run)
        taccl_tcp_finish(s, message);
    else if (!message->eager)
        taccl_tcp_say(s, message->link, READY, message->tag);
}

/* A run has begun, and with it what has come of it already. */
int taccl_tcp_begin(struct links *s)
{
    for (int64_t i = 0; i < s->count; i++) {
        struct link *link = s->links + i;
        if (link->lost || !link->early)
            continue;
        link->early = 0;
        taccl_tcp_want(s, link, EPOLLIN, 1);
        taccl_tcp_look(s, link);
    }
    return troubled(s);
}

/* Wait so long for something that can be moved, and move it. How many files have something, or less than 0; rang: set
 * where one of them is no link's, but a bell. */
static int look(struct links *s, int wait_ms, int *rang)
{
    struct epoll_event events[EVENTS];
    int ready = epoll_wait((int)s->poller, events, EVENTS, wait_ms);
    for (int i = 0; i < ready && !s->fault; i++) {
        int64_t fd = events[i].data.fd, number = fd < s->fds ? s->by_fd[fd] : -1;
        if (number < 0) {
            *rang = 1;
            continue;
        }
        struct link *link = s->links + number;
        if (events[i].events & ~(uint32_t)EPOLLOUT)
            taccl_tcp_read(s, link);
        if (events[i].events & EPOLLOUT && !s->fault)
            taccl_tcp_write(s, link, 0);
    }
    if (ready > 0 && !s->fault)
        taccl_tcp_hand_over(s); /* words that follow from what was read: the rank may sleep next */
    return ready;
}

/* Move what can be moved. */
int taccl_tcp_move(struct links *s)
{
    int rang = 0;
    if (s->fault)
        return 1;
    taccl_tcp_hand_over(s);
    look(s, 0, &rang);
    return troubled(s);
}

/* Sleep so long, and move what can be moved meanwhile: parts of messages, about which nobody else need wake up. It ends
 * early when a message is finished or a link has nothing more to carry, for a bell, for a signal, and when something
 * goes wrong, which the next move says. Whether a bell rang. */
int taccl_tcp_sleep(struct links *s, int64_t most_ns)
{
    int64_t news = s->news, drained = s->drained, lost = s->lost, end = taccl_tcp_now_ns() + most_ns;
    int rang = 0;
    while (!rang && !s->fault && s->lost == lost && s->news == news && s->drained == drained) {
        int64_t now = taccl_tcp_now_ns(), until = s->due_ns && s->due_ns < end ? s->due_ns : end;
        if (now >= end)
            break;
        int ready = look(s, until > now ? (int)((until - now + MS - 1) / MS) : 0, &rang);
        if (ready < 0)
            break;
        if (!ready)
            taccl_tcp_hand_over(s); /* what was due */
    }
    return rang;
}

/* Whether something waits until the kernel takes it. */
int taccl_tcp_owes(const struct links *s)
{
    for (int64_t i = 0; i < s->count; i++)
        if (!s->links[i].lost && (s->links[i].words_bytes || taccl_tcp_under_way(s->links + i)))
            return 1;
    return 0;
}
