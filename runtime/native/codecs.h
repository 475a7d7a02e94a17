/* What tiles of all codecs share. */
#ifndef TACCL_CODECS_H
#define TACCL_CODECS_H

#include "clones.h"

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define TACCL_VECTORS 1

/* Not 0: loops for AVX2 are left out, as on a processor that has none. */
extern int taccl_plain;

static inline int taccl_vectors(void)
{
    return !taccl_plain && __builtin_cpu_supports("avx2");
}
#endif

/* The next multiple of `to`, a power of two. */
static inline int64_t aligned(int64_t bytes, int64_t to)
{
    return (bytes + to - 1) & -to;
}

enum { TILE = 65536 };
enum mode { RAW, CODED, ZERO_MAP };

/* As Entry in runtime/codecs/codec.py. */
struct entry {
    int64_t bytes, mode, kept, base, bits, sparse, exceptions;
};

/* Of values of 2 or 4 bytes. Whether the tile was coded, smaller than it is; whether it was decoded. scratch: 8 TILE
 * bytes, of which bytes 2 TILE to 4 TILE are not used where values have 2. */
int taccl_xw_encode(const void *words, int64_t width, int64_t count, uint8_t *wire, void *scratch, struct entry *e);
int taccl_xw_decode(const uint8_t *wire, const struct entry *e, int64_t width, int64_t count, void *words,
                    void *scratch);

/* Bytes of coded tiles of fixed length. */
int64_t taccl_q8_bytes(int64_t count);
int64_t taccl_fp8_bytes(int64_t count);

/* Whether the tile was coded: not where it has NaN or infinities. */
int taccl_q8_encode(const float *values, int64_t count, uint8_t *wire);
int taccl_fp8_encode(const float *values, int64_t count, uint8_t *wire);
void taccl_q8_decode(const uint8_t *wire, int64_t count, float *values);
void taccl_fp8_decode(const uint8_t *wire, int64_t count, float *values);

/* To the nearest bfloat16, ties to even, and back. */
void taccl_round(const float *values, int64_t count, uint16_t *half);
void taccl_widen(const uint16_t *half, int64_t count, float *values);

uint64_t taccl_checksum(const void *data, int64_t bytes);

#endif
