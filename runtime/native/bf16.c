/* The codec `bf16`: float32 to the nearest bfloat16, ties to even; every NaN becomes the quiet one of its sign. */
#include "codecs.h"

#include <stdint.h>
#include <string.h>

CLONES void taccl_round(const float *values, int64_t count, uint16_t *half)
{
    const uint32_t *words = (const uint32_t *)values;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = words[i], rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        uint32_t quiet = (bits >> 16 & 0x8000) | 0x7FC0;
        half[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
    }
}

CLONES void taccl_widen(const uint16_t *half, int64_t count, float *values)
{
    uint32_t *words = (uint32_t *)values;
    for (int64_t i = 0; i < count; i++)
        words[i] = (uint32_t)half[i] << 16;
}
