/* One rank's run of a plan whose messages all go through the memory of its node.
 *
 * What Executor.advance (runtime/executor.py) does, on the same graph of operations: what became ready last runs first,
 * and all outstanding messages are polled, which are a load each. Flags, parcels, lent and read messages are those of
 * runtime/shm.py. Whatever this file has no code for, it hands back to Python (CALL).
 *
 * A caller comes back after so many polls without success, for signals, for the MPI library and for its deadline.
 */
#define _GNU_SOURCE
#include "clones.h"
#include "copy.h"

#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum kind { SEND, RECEIVE, COPY, REDUCE, CALL };
enum work { NOTHING, MOVE, READ };          /* of a message that has arrived */
enum code { DONE, IDLE, ASK };              /* what a caller is told */
enum phase { LATER, STARTED, FINISHED };
enum { LOOKS = 40 };                        /* a microsecond */
enum { TRIES = 5, ANEW = 64 };              /* runs */

/* As OPERATION in runtime/native_run.py. Pairs: in runs of an even and of an odd number. Addresses; 0: none. */
struct operation {
    int64_t kind, needed;                   /* predecessors */
    int64_t first, count;                   /* of its followers */
    int64_t bytes;
    int64_t to[2], from[2], mine;
    int64_t wait, tell, release;            /* cells of flags */
    int64_t process;                        /* to read from */
    int64_t how;                            /* enum work, or which sum */
    int64_t asleep, pipe;                   /* cell of the peer: whether it sleeps; what wakes it */
    int64_t missing, phase, when_ns;        /* in a run */
};

/* As Way in runtime/native_run.py: how to copy, past the caches or not, and the time in this run, and in one each way. */
struct way {
    int64_t past, tries;                    /* tries: whether both ways are timed */
    int64_t now_ns, taken_ns[2];
};

/* As State in runtime/native_run.py. */
struct state {
    struct operation *operations;
    const int64_t *followers, *first;       /* numbers of operations, what goes first stands last */
    int64_t *ready, *outstanding;
    int64_t count, firsts, left, readies, started;
    const int64_t *run;                     /* its number */
    int64_t epoch, marks;
    struct way copies, reads;               /* of own memory and of what is shared; of the kernel's between processes */
    int64_t runs;                           /* begun */
    int64_t polls, spins, yields;
    int64_t asked;                          /* of ASK: the operation */
};

const int64_t taccl_operation_bytes = sizeof(struct operation), taccl_state_bytes = sizeof(struct state);

typedef void sum(void *, const void *, const void *, int64_t);

/* The target may be one of the operands; then each value is read before it is written. */
#define SUM(name, type)                                                                                               \
    CLONES static void name(void *to, const void *mine, const void *received, int64_t bytes)                           \
    {                                                                                                                  \
        type *t = to;                                                                                                  \
        const type *a = mine, *b = received;                                                                           \
        int64_t n = bytes / (int64_t)sizeof(type);                                                                     \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) t[i] = (type)(a[i] + b[i]);                               \
    }

SUM(sum_float32, float)
SUM(sum_float64, double)
SUM(sum_int32, uint32_t) /* wraps, as numpy's does */
SUM(sum_int64, uint64_t)
SUM(sum_uint8, uint8_t)

/* As SUMS in runtime/native_run.py. */
static sum *const SUMS[] = {sum_float32, sum_float64, sum_int32, sum_int64, sum_uint8};

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void set(int64_t cell, int64_t epoch)
{
    __atomic_store_n((int64_t *)(intptr_t)cell, epoch, __ATOMIC_RELEASE);
}

/* A flag of the peer was set. Wake it if it sleeps (runtime/sleep.py). */
static void ring(const struct operation *op)
{
    if (!op->asleep)
        return;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n((const int64_t *)(intptr_t)op->asleep, __ATOMIC_RELAXED)) {
        ssize_t written = write((int)op->pipe, "", 1); /* it is full: the peer wakes anyway */
        (void)written;
    }
}

static int is_set(int64_t cell, int64_t epoch)
{
    return __atomic_load_n((const int64_t *)(intptr_t)cell, __ATOMIC_ACQUIRE) >= epoch;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Copy, or read from a process, and note the time. 0, or why it failed. */
static int timed(struct way *way, pid_t process, int64_t to, int64_t from, int64_t bytes)
{
    int watched = way->tries && bytes >= STREAMED, failed = 0;
    int64_t begun = watched ? now_ns() : 0;
    if (process)
        failed = taccl_read(process, (void *)(intptr_t)to, (uintptr_t)from, (size_t)bytes, (int)way->past);
    else
        taccl_copy((void *)(intptr_t)to, (const void *)(intptr_t)from, (size_t)bytes, (int)way->past);
    if (watched)
        way->now_ns += now_ns() - begun;
    return failed;
}

static void move(struct state *s, const struct operation *op)
{
    int turn = (int)(s->epoch & 1);
    timed(&s->copies, 0, op->to[turn], op->from[turn], op->bytes);
}

/* How to copy in the next run. Where cores share no cache, a store to a line that another core has in its own costs much
 * more than one that goes past the caches, and less where they do; which lines those are depends on what the program's
 * callers do as well. So both ways take their turn in the first runs, the one not taken again now and then. The first run
 * meets memory that nobody has touched. What took long once may have been interrupted, so times grow slowly. */
static void choose(struct way *way, int64_t runs)
{
    int64_t *taken = &way->taken_ns[way->past], found = way->now_ns, most = *taken + *taken / 4;
    way->now_ns = 0;
    if (!way->tries || !runs || !found)
        return;
    if (runs > 1)
        *taken = !*taken || found < most ? found : most;
    if (runs > 1 && runs < TRIES)
        way->past = !way->past;
    else if (runs >= TRIES)
        way->past = (way->taken_ns[1] < way->taken_ns[0]) ^ (runs % ANEW == 0);
}

static void finish(struct state *s, struct operation *op)
{
    op->phase = FINISHED;
    s->left--;
    for (int64_t i = op->first; i < op->first + op->count; i++) {
        struct operation *later = s->operations + s->followers[i];
        if (--later->missing == 0)
            s->ready[s->readies++] = s->followers[i];
    }
}

/* What is local is done, and the sender told that its memory was read. */
static void pass(struct state *s, struct operation *op)
{
    if (op->release) {
        set(op->release, s->epoch);
        ring(op);
    }
    finish(s, op);
}

/* Whether Python has to do it. */
static int arrive(struct state *s, int64_t number)
{
    struct operation *op = s->operations + number;
    if (op->kind == SEND) {
        finish(s, op);
        return 0;
    }
    if (s->marks)
        op->when_ns = now_ns();
    if (op->how == MOVE) {
        move(s, op);
    } else if (op->how == READ) {
        if (timed(&s->reads, (pid_t)op->process, op->to[0], op->from[0], op->bytes)) {
            s->asked = number; /* there errors have words */
            return 1;
        }
    }
    pass(s, op);
    return 0;
}

/* Whether Python has to do it. */
static int begin(struct state *s, int64_t number)
{
    struct operation *op = s->operations + number;
    int turn = (int)(s->epoch & 1);
    switch (op->kind) {
    case SEND:
        if (s->marks)
            op->when_ns = now_ns();
        if (op->to[0])
            move(s, op);
        set(op->tell, s->epoch);
        ring(op);
        if (!op->wait) {
            finish(s, op);
            return 0;
        }
        break;
    case RECEIVE:
        break;
    case COPY:
        move(s, op);
        pass(s, op);
        return 0;
    case REDUCE:
        SUMS[op->how]((void *)(intptr_t)op->to[turn], (const void *)(intptr_t)op->mine,
                      (const void *)(intptr_t)op->from[turn], op->bytes);
        pass(s, op);
        return 0;
    default:
        s->asked = number;
        return 1;
    }
    op->phase = STARTED;
    s->outstanding[s->started++] = number;
    return 0;
}

static void start(struct state *s, int64_t epoch)
{
    choose(&s->copies, s->runs);
    choose(&s->reads, s->runs++);
    s->epoch = epoch;
    s->left = s->count;
    s->readies = s->started = 0;
    for (int64_t i = 0; i < s->count; i++) {
        s->operations[i].missing = s->operations[i].needed;
        s->operations[i].phase = LATER;
    }
    memcpy(s->ready, s->first, (size_t)s->firsts * sizeof(int64_t));
    s->readies = s->firsts;
}

/* Python has done what it was asked for. */
void taccl_answer(struct state *s)
{
    pass(s, s->operations + s->asked);
}

/* Begin the run whose number it is, if that is another one than the last; go on until it is done, Python has something
 * to do, or `polls` polls one after another found nothing. After each of these beyond the first `spins` the core is
 * offered to other processes, where `yields` says so. */
int taccl_advance(struct state *s)
{
    int64_t vain = 0;
    if (*s->run != s->epoch)
        start(s, *s->run);
    for (;;) {
        while (s->readies)
            if (begin(s, s->ready[--s->readies]))
                return ASK;
        if (!s->left)
            return DONE;
        /* A poll here takes no longer than a load. Ranks that have cores of their own look more often before they call
         * the system. */
        for (int64_t i = 0; s->started == 1 && s->spins && i < LOOKS; i++) {
            if (is_set(s->operations[s->outstanding[0]].wait, s->epoch))
                break;
            pause_briefly();
        }
        /* What arrives is passed on before the next one is looked at. */
        int64_t kept = 0, count = s->started, found = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t number = s->outstanding[i];
            if (!found && is_set(s->operations[number].wait, s->epoch)) {
                found = 1;
                if (arrive(s, number)) {
                    memmove(s->outstanding + i, s->outstanding + i + 1, (size_t)(count - i - 1) * sizeof(int64_t));
                    s->started = count - 1;
                    return ASK;
                }
                continue;
            }
            s->outstanding[kept++] = number;
        }
        s->started = kept;
        if (found) {
            vain = 0;
            continue;
        }
        if (++vain > s->spins && s->yields)
            sched_yield();
        if (vain >= s->polls)
            return IDLE;
    }
}
