/* Tiles of the codec `q8`: the bytes of runtime/codecs/q8.py. Tiles with NaN or infinities are left to it. */
#include "codecs.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 256 };

static const float LEVELS = 127, ROUND = 3 << 22;

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Bits of floats without a sign are ordered as the floats, NaN last, and integers reduce faster. */
CLONES static uint32_t largest_bits(const uint32_t *bits, int64_t count)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t size = bits[i] & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    return largest;
}

CLONES static void quantise(const float *values, int64_t count, float inverse, uint8_t *codes)
{
    for (int64_t i = 0; i < count; i++) {
        /* The nearest integer, ties to even, in the low bits. */
        float rounded = values[i] * inverse + ROUND;
        uint32_t bits;
        memcpy(&bits, &rounded, 4);
        codes[i] = (uint8_t)bits;
    }
}

int64_t taccl_q8_bytes(int64_t count)
{
    return aligned(4 * ((count + BLOCK - 1) / BLOCK), 16) + aligned(count, 16);
}

/* Its scales, then its bytes, zeros up to 16 behind both. */
int taccl_q8_encode(const float *values, int64_t count, uint8_t *wire)
{
    int64_t blocks = (count + BLOCK - 1) / BLOCK, start = aligned(4 * blocks, 16), end = start + aligned(count, 16);
    float *scales = (float *)wire;
    for (int64_t block = 0; block < blocks; block++) {
        const float *first = values + block * BLOCK;
        int64_t length = count - block * BLOCK < BLOCK ? count - block * BLOCK : BLOCK;
        float largest = from_bits(largest_bits((const uint32_t *)first, length));
        if (!(largest < INFINITY))
            return 0;
        float scale = 0, inverse = 0;
        if (largest >= 0x1p-119f) {
            scale = largest / LEVELS;
            /* A scale that was rounded up may overflow when it is multiplied again. */
            if (isinf(scale * LEVELS)) {
                uint32_t bits;
                memcpy(&bits, &scale, 4);
                scale = from_bits(bits - 1);
            }
            inverse = LEVELS / largest;
        }
        scales[block] = scale;
        quantise(first, length, inverse, wire + start + block * BLOCK);
    }
    memset(wire + 4 * blocks, 0, (size_t)(start - 4 * blocks));
    memset(wire + start + count, 0, (size_t)(end - start - count));
    return 1;
}

CLONES static void multiply(const int8_t *codes, int64_t count, float scale, float *values)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)codes[i] * scale;
}

void taccl_q8_decode(const uint8_t *wire, int64_t count, float *values)
{
    int64_t blocks = (count + BLOCK - 1) / BLOCK, start = aligned(4 * blocks, 16);
    const float *scales = (const float *)wire;
    for (int64_t block = 0; block < blocks; block++) {
        const int8_t *codes = (const int8_t *)wire + start + block * BLOCK;
        float *first = values + block * BLOCK;
        int64_t length = count - block * BLOCK < BLOCK ? count - block * BLOCK : BLOCK;
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
