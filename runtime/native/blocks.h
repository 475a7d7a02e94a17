/* Tiles of one byte a value and one float32 scale for every block of values, as runtime/codecs/blocks.py has them: the
 * scales, zeros up to 16, the bytes, zeros up to 16. */
#ifndef TACCL_BLOCKS_H
#define TACCL_BLOCKS_H

#include "codecs.h"

#include <stdint.h>
#include <string.h>

struct blocks {
    int64_t number, start, bytes;       /* of blocks; the first byte of the values; of the tile */
};

static inline struct blocks blocks_of(int64_t count, int64_t length)
{
    int64_t number = (count + length - 1) / length, start = aligned(4 * number, 16);
    struct blocks found = {number, start, start + aligned(count, 16)};
    return found;
}

/* Values of a block; the last one may be shorter. */
static inline int64_t length_of(int64_t block, int64_t count, int64_t length)
{
    return count - block * length < length ? count - block * length : length;
}

static inline void clear_padding(const struct blocks *b, int64_t count, uint8_t *wire)
{
    memset(wire + 4 * b->number, 0, (size_t)(b->start - 4 * b->number));
    memset(wire + b->start + count, 0, (size_t)(b->bytes - b->start - count));
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The largest size; not below infinity where there is one, or a NaN. Bits of floats without a sign are ordered as the
 * floats, NaN last, and integers reduce faster. */
CLONES static float largest(const float *values, int64_t count)
{
    const uint32_t *bits = (const uint32_t *)values;
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t size = bits[i] & 0x7FFFFFFF;
        found = size > found ? size : found;
    }
    return from_bits(found);
}

#endif
