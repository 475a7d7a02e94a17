/* Tiles of the codec `fp8`: the bytes of runtime/codecs/fp8.py. Tiles with NaN or infinities are left to it. */
#include "blocks.h"

#include <math.h>
#include <stdint.h>

enum { BLOCK = 128 };

static const float LARGEST = 448, SMALLEST_NORMAL = 0x1p-6f, ROUND_SUBNORMAL = 0x1p14f;

int64_t taccl_fp8_bytes(int64_t count)
{
    return blocks_of(count, BLOCK).bytes;
}

/* Two ways to round, for normal numbers and for others; each gets 2^-6 where it is the other's turn, whose code is 8, so
 * that the codes add up. */
CLONES static void quantise(const float *values, int64_t count, float inverse, uint8_t *codes)
{
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(values[i]) * inverse;
        size = size < LARGEST ? size : LARGEST;
        uint32_t large = bits_of(size > SMALLEST_NORMAL ? size : SMALLEST_NORMAL);
        uint32_t small = bits_of((size < SMALLEST_NORMAL ? size : SMALLEST_NORMAL) + ROUND_SUBNORMAL);
        large = (large + (large >> 20 & 1) + 0x7FFFF - (UINT32_C(120) << 23)) >> 20;
        codes[i] = (uint8_t)(((large + small - 8) & 0xFF) | (bits_of(values[i]) >> 24 & 0x80));
    }
}

int taccl_fp8_encode(const float *values, int64_t count, uint8_t *wire)
{
    struct blocks b = blocks_of(count, BLOCK);
    float *scales = (float *)wire;
    for (int64_t block = 0; block < b.number; block++) {
        const float *first = values + block * BLOCK;
        int64_t length = length_of(block, count, BLOCK);
        float most = largest(first, length);
        if (!(most < INFINITY))
            return 0;
        int tiny = most < 0x1p-117f;
        scales[block] = tiny ? 0 : most / LARGEST;
        quantise(first, length, tiny ? 0 : LARGEST / most, wire + b.start + block * BLOCK);
    }
    clear_padding(&b, count, wire);
    return 1;
}

/* The value of a code without its scale, by its bits: subnormals are exact multiples of 2^-9. */
static float value_of(uint8_t code)
{
    uint32_t size = code & 0x7F, sign = (uint32_t)(code & 0x80) << 24, bits;
    if (size == 0x7F)
        bits = 0x7FC00000;
    else if (size < 8)
        bits = bits_of((float)size * 0x1p-9f);
    else
        bits = (size << 20) + (UINT32_C(120) << 23);
    return from_bits(bits | sign);
}

CLONES static void multiply(const float *table, const uint8_t *codes, int64_t count, float scale, float *values)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = table[codes[i]] * scale;
}

void taccl_fp8_decode(const uint8_t *wire, int64_t count, float *values)
{
    struct blocks b = blocks_of(count, BLOCK);
    const float *scales = (const float *)wire;
    float table[256];
    for (int code = 0; code < 256; code++)
        table[code] = value_of((uint8_t)code);
    for (int64_t block = 0; block < b.number; block++) {
        int64_t length = length_of(block, count, BLOCK);
        multiply(table, wire + b.start + block * BLOCK, length, scales[block], values + block * BLOCK);
    }
}
