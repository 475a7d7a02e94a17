/* Copies of long messages.
 *
 * A store fetches the cache line that it overwrites, unless it goes past the caches. Where a collective moves half of what
 * the last-level cache holds or more, little of what is written is read again before it is evicted, and stores past the
 * caches leave that much of the memory's bandwidth to others. Where cores share no cache they are quicker for short copies, too
 * (choose() in executor.c).
 *
 * The kernel's copy between processes runs at a fifth to a half of its speed on AMD processors (seen on Zen 3) where the
 * target lies 1 to 63 bytes behind the source within its page, most likely because `rep movsb` takes them for overlapping.
 * Such messages go through a buffer that lies as the source does. `make bench-copies` has both.
 */
#define _GNU_SOURCE
#include "copy.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define VECTORS 1
#endif

enum { SHORT = 2048, PAGE = 4096, BUFFER = 64 * 1024, LINE = 64 };

/* Of a call; the kernel reads at most 2 GiB less a page. */
static const size_t MOST = (size_t)1 << 30;

#ifdef VECTORS
/* Whole pairs of lines, the first of them aligned in the target. */
__attribute__((target("avx2"))) static void by_vectors(char *to, const char *from, size_t bytes, int stream)
{
    for (size_t at = 0; at < bytes; at += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + at + 96));
        __m256i *line = (__m256i *)(to + at);
        if (stream) {
            _mm256_stream_si256(line, a);
            _mm256_stream_si256(line + 1, b);
            _mm256_stream_si256(line + 2, c);
            _mm256_stream_si256(line + 3, d);
        } else {
            _mm256_store_si256(line, a);
            _mm256_store_si256(line + 1, b);
            _mm256_store_si256(line + 2, c);
            _mm256_store_si256(line + 3, d);
        }
    }
    /* Flags that say that the data are there must not be seen before what went past the caches. */
    if (stream)
        _mm_sfence();
}
#endif

void taccl_copy(void *to, const void *from, size_t bytes, int stream)
{
#ifdef VECTORS
    if (bytes >= SHORT && __builtin_cpu_supports("avx2")) {
        size_t head = -(uintptr_t)to & (LINE - 1);
        memcpy(to, from, head);
        char *target = (char *)to + head;
        const char *source = (const char *)from + head;
        size_t left = bytes - head, whole = left & ~(size_t)127;
        by_vectors(target, source, whole, stream && whole >= STREAMED);
        memcpy(target + whole, source + whole, left - whole);
        return;
    }
#else
    (void)stream;
#endif
    memcpy(to, from, bytes);
}

static int read_part(pid_t process, void *to, uintptr_t from, size_t bytes)
{
    struct iovec here = {to, bytes}, there = {(void *)from, bytes};
    ssize_t read = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (read < 0)
        return errno;
    if ((size_t)read == bytes)
        return 0;
    /* Asked for what comes next, the kernel says why it stopped. */
    here.iov_base = (char *)to + read;
    there.iov_base = (void *)(from + (size_t)read);
    here.iov_len = there.iov_len = 1;
    return process_vm_readv(process, &here, 1, &there, 1, 0) < 0 ? errno : -1;
}

int taccl_read(pid_t process, void *to, uintptr_t from, size_t bytes, int stream)
{
    static _Thread_local char buffer[BUFFER + PAGE];
    size_t behind = ((uintptr_t)to - from) & (PAGE - 1);
    int in_parts = stream || (behind > 0 && behind < LINE);
    char *between = buffer + ((from - (uintptr_t)buffer) & (PAGE - 1));
    for (size_t at = 0; at < bytes;) {
        size_t part = bytes - at, most = in_parts ? BUFFER : MOST;
        if (part > most)
            part = most;
        char *target = (char *)to + at;
        int why = read_part(process, in_parts ? between : target, from + at, part);
        if (why)
            return why;
        if (in_parts)
            taccl_copy(target, between, part, stream);
        at += part;
    }
    return 0;
}
