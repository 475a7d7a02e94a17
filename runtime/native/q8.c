/* Tiles of the codec `q8`: the bytes of runtime/codecs/q8.py. Tiles with NaN or infinities are left to it. */
#include "blocks.h"

#include <math.h>
#include <stdint.h>

enum { BLOCK = 256 };

static const float LEVELS = 127, ROUND = 3 << 22;

CLONES static void quantise(const float *values, int64_t count, float inverse, uint8_t *codes)
{
    for (int64_t i = 0; i < count; i++) {
        /* The nearest integer, ties to even, in the low bits. */
        codes[i] = (uint8_t)bits_of(values[i] * inverse + ROUND);
    }
}

int64_t taccl_q8_bytes(int64_t count)
{
    return blocks_of(count, BLOCK).bytes;
}

int taccl_q8_encode(const float *values, int64_t count, uint8_t *wire)
{
    struct blocks b = blocks_of(count, BLOCK);
    float *scales = (float *)wire;
    for (int64_t block = 0; block < b.number; block++) {
        const float *first = values + block * BLOCK;
        int64_t length = length_of(block, count, BLOCK);
        float most = largest(first, length), scale = 0, inverse = 0;
        if (!(most < INFINITY))
            return 0;
        if (most >= 0x1p-119f) {
            scale = most / LEVELS;
            /* A scale that was rounded up may overflow when it is multiplied again. */
            if (isinf(scale * LEVELS))
                scale = from_bits(bits_of(scale) - 1);
            inverse = LEVELS / most;
        }
        scales[block] = scale;
        quantise(first, length, inverse, wire + b.start + block * BLOCK);
    }
    clear_padding(&b, count, wire);
    return 1;
}

CLONES static void multiply(const int8_t *codes, int64_t count, float scale, float *values)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)codes[i] * scale;
}

void taccl_q8_decode(const uint8_t *wire, int64_t count, float *values)
{
    struct blocks b = blocks_of(count, BLOCK);
    const float *scales = (const float *)wire;
    for (int64_t block = 0; block < b.number; block++) {
        const int8_t *codes = (const int8_t *)wire + b.start + block * BLOCK;
        float *first = values + block * BLOCK;
        int64_t length = length_of(block, count, BLOCK);
        multiply(codes, length, fabsf(scales[block]), first);
        if (!signbit(scales[block]))
            continue;
        for (int64_t i = 0; i < length; i++) {
            if (codes[i] == 126)
                first[i] = INFINITY;
            else if (codes[i] == -126)
                first[i] = -INFINITY;
            else if (codes[i] == -128)
                first[i] = from_bits(0x7FC00000);
        }
    }
}
