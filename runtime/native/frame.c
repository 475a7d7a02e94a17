/* Whole frames: what runtime/codecs/coding.py and frame.py do, in one call. docs/codecs.md has the layout.
 *
 * Whatever is not as it should be is left to the twin in Python, which has words for it.
 */
#include "codecs.h"

#include <stdint.h>
#include <string.h>

enum { HEADER = 64, ENTRY = 24, STEP = 256, ALIGNMENT = 16, VERSION = 1 };
enum codec { RAW_CODEC = 0, XW = 1, BF16 = 2, Q8 = 3, FP8 = 4, BF16_XW = 7 };
enum type { UINT8, FLOAT32, BFLOAT16, FLOAT16, INT32, INT64, FLOAT64 };

static const int64_t WIDTHS[] = {1, 4, 2, 2, 4, 8, 8};

/* As `Call` in runtime/codecs/compiled.py. */
struct call {
    int64_t codec, type, count, tile;
    int64_t rank, chunk;                /* expected of a frame: -1 where any will do */
    void *values;
    uint8_t *wire;
    int64_t bytes;                      /* of the wire */
    void *scratch, *spare;              /* 8 TILE bytes each */
};

const int64_t taccl_call_bytes = sizeof(struct call);

/* Whether the codec is one of these and takes the type. */
static int known(const struct call *c)
{
    switch (c->codec) {
    case RAW_CODEC:
        return c->type >= UINT8 && c->type <= FLOAT64;
    case XW:
        return c->type >= FLOAT32 && c->type <= FLOAT16;
    case BF16:
    case Q8:
    case FP8:
    case BF16_XW:
        return c->type == FLOAT32;
    default:
        return 0;
    }
}

static uint32_t crc32(const uint8_t *data, int64_t bytes)
{
    uint32_t crc = ~UINT32_C(0);
    for (int64_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (UINT32_C(0xEDB88320) & -(crc & 1));
    }
    return ~crc;
}

static int64_t directory_end(int64_t tiles)
{
    return aligned(HEADER + ENTRY * tiles, ALIGNMENT);
}

static void put_raw(const void *values, int64_t bytes, int64_t count, uint8_t *wire, struct entry *e)
{
    memset(e, 0, sizeof *e);
    e->bytes = aligned(bytes, ALIGNMENT);
    e->mode = RAW;
    e->kept = count;
    memcpy(wire, values, (size_t)bytes);
    memset(wire + bytes, 0, (size_t)(e->bytes - bytes));
}

static void fixed(struct entry *e, int64_t bytes, int64_t count)
{
    memset(e, 0, sizeof *e);
    e->bytes = bytes;
    e->mode = CODED;
    e->kept = count;
}

static int encode_tile(const struct call *c, const void *values, int64_t count, uint8_t *wire, struct entry *e)
{
    uint16_t *half = (uint16_t *)((uint8_t *)c->scratch + 2 * TILE);
    int64_t width = WIDTHS[c->type];
    switch (c->codec) {
    case RAW_CODEC:
        put_raw(values, width * count, count, wire, e);
        return 1;
    case XW:
        if (!taccl_xw_encode(values, width, count, wire, c->scratch, e))
            put_raw(values, width * count, count, wire, e);
        return 1;
    case BF16:
        fixed(e, aligned(2 * count, ALIGNMENT), count);
        taccl_round(values, count, (uint16_t *)wire);
        memset(wire + 2 * count, 0, (size_t)(e->bytes - 2 * count));
        return 1;
    case BF16_XW:
        taccl_round(values, count, half);
        if (!taccl_xw_encode(half, 2, count, wire, c->scratch, e))
            put_raw(half, 2 * count, count, wire, e);
        return 1;
    case Q8:
        fixed(e, taccl_q8_bytes(count), count);
        return taccl_q8_encode(values, count, wire);
    default:
        fixed(e, taccl_fp8_bytes(count), count);
        return taccl_fp8_encode(values, count, wire);
    }
}

static int is_raw(const struct entry *e, int64_t bytes, int64_t count)
{
    return e->bytes == aligned(bytes, ALIGNMENT) && e->mode == RAW && e->kept == count && !e->base && !e->bits &&
           !e->sparse && !e->exceptions;
}

static int is_fixed(const struct entry *e, int64_t bytes, int64_t count)
{
    return e->bytes == bytes && e->mode == CODED && e->kept == count && !e->base && !e->bits && !e->sparse &&
           !e->exceptions;
}

static int decode_tile(const struct call *c, const uint8_t *wire, const struct entry *e, int64_t count, void *values)
{
    uint16_t *half = (uint16_t *)((uint8_t *)c->scratch + 2 * TILE);
    int64_t width = WIDTHS[c->type];
    switch (c->codec) {
    case RAW_CODEC:
    case XW:
        if (c->codec == XW && e->mode != RAW)
            return taccl_xw_decode(wire, e, width, count, values, c->scratch);
        if (!is_raw(e, width * count, count))
            return 0;
        memmove(values, wire, (size_t)(width * count));
        return 1;
    case BF16:
        if (!is_fixed(e, aligned(2 * count, ALIGNMENT), count))
            return 0;
        taccl_widen((const uint16_t *)wire, count, values);
        return 1;
    case BF16_XW:
        if (e->mode == RAW) {
            if (!is_raw(e, 2 * count, count))
                return 0;
            taccl_widen((const uint16_t *)wire, count, values);
            return 1;
        }
        if (!taccl_xw_decode(wire, e, 2, count, half, c->scratch))
            return 0;
        taccl_widen(half, count, values);
        return 1;
    case Q8:
        if (!is_fixed(e, taccl_q8_bytes(count), count))
            return 0;
        taccl_q8_decode(wire, count, values);
        return 1;
    default:
        if (!is_fixed(e, taccl_fp8_bytes(count), count))
            return 0;
        taccl_fp8_decode(wire, count, values);
        return 1;
    }
}

static void write_u16(uint8_t *to, int64_t value)
{
    uint16_t number = (uint16_t)value;
    memcpy(to, &number, 2);
}

static void write_u32(uint8_t *to, int64_t value)
{
    uint32_t number = (uint32_t)value;
    memcpy(to, &number, 4);
}

static int64_t read_u16(const uint8_t *from)
{
    uint16_t number;
    memcpy(&number, from, 2);
    return number;
}

static int64_t read_u32(const uint8_t *from)
{
    uint32_t number;
    memcpy(&number, from, 4);
    return number;
}

static uint64_t read_u64(const uint8_t *from)
{
    uint64_t number;
    memcpy(&number, from, 8);
    return number;
}

/* The bytes of the frame; 0 where it is left to Python. The wire has room for the longest frame. */
int64_t taccl_encode(const struct call *c)
{
    if (!known(c))
        return 0;
    int64_t tiles = (c->count + c->tile - 1) / c->tile, place = directory_end(tiles), width = WIDTHS[c->type];
    uint8_t *wire = c->wire;
    for (int64_t index = 0; index < tiles; index++) {
        int64_t first = index * c->tile, count = c->count - first < c->tile ? c->count - first : c->tile;
        struct entry e;
        if (!encode_tile(c, (const uint8_t *)c->values + first * width, count, wire + place, &e))
            return 0;
        uint8_t *row = wire + HEADER + ENTRY * index;
        uint64_t sum = taccl_checksum(wire + place, e.bytes);
        memcpy(row, &sum, 8);
        write_u32(row + 8, e.bytes);
        write_u32(row + 12, e.kept);
        row[16] = (uint8_t)e.mode;
        row[17] = (uint8_t)e.base;
        row[18] = (uint8_t)e.bits;
        row[19] = 0;
        write_u16(row + 20, e.sparse);
        write_u16(row + 22, e.exceptions);
        place += e.bytes;
    }
    int64_t end = HEADER + ENTRY * tiles;
    memset(wire + end, 0, (size_t)(directory_end(tiles) - end));
    memset(wire, 0, HEADER);
    memcpy(wire, "TCF1", 4);
    wire[4] = VERSION;
    wire[5] = (uint8_t)c->codec;
    wire[6] = (uint8_t)c->type;
    memcpy(wire + 8, &c->count, 8);
    int64_t payload = place - HEADER;
    memcpy(wire + 16, &payload, 8);
    write_u32(wire + 24, c->tile);
    write_u32(wire + 28, tiles);
    write_u32(wire + 32, c->rank);
    write_u32(wire + 36, c->chunk);
    uint64_t sum = taccl_checksum(wire + HEADER, directory_end(tiles) - HEADER);
    memcpy(wire + 40, &sum, 8);
    write_u32(wire + 60, crc32(wire, HEADER - 4));
    return place;
}

/* The bytes of a frame whose header and directory are those that are expected; 0 where they are not. */
static int64_t check(const struct call *c)
{
    static const uint8_t zeros[12];
    const uint8_t *wire = c->wire;
    if (!known(c) || c->bytes < HEADER || memcmp(wire, "TCF1", 4) || crc32(wire, HEADER - 4) != read_u32(wire + 60))
        return 0;
    uint64_t count = read_u64(wire + 8), payload = read_u64(wire + 16);
    int64_t tile = read_u32(wire + 24), tiles = read_u32(wire + 28);
    if (wire[4] != VERSION || wire[5] != c->codec || wire[6] != c->type || wire[7] || memcmp(wire + 48, zeros, 12) ||
        count != (uint64_t)c->count || payload > (uint64_t)(c->bytes - HEADER) || tile < STEP || tile > TILE ||
        tile % STEP || tiles != (c->count + tile - 1) / tile ||
        (c->rank >= 0 && (c->rank != read_u32(wire + 32) || c->chunk != read_u32(wire + 36))))
        return 0;
    int64_t bytes = HEADER + (int64_t)payload, place = directory_end(tiles);
    if (bytes % ALIGNMENT || bytes < place ||
        taccl_checksum(wire + HEADER, place - HEADER) != read_u64(wire + 40))
        return 0;
    for (int64_t index = 0; index < tiles; index++) {
        const uint8_t *row = wire + HEADER + ENTRY * index;
        int64_t part = read_u32(row + 8);
        if (part % ALIGNMENT || place + part > bytes || row[19])
            return 0;
        place += part;
    }
    return place == bytes ? bytes : 0;
}

CLONES static void add(float *total, const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        total[i] += values[i];
}

CLONES static void add_short(float *total, const uint16_t *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)values[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        total[i] += value;
    }
}

/* Decode, or with `sum` add to float32 what is decoded. The bytes of the frame; 0: nothing was done; -1: a tile is
 * wrong. */
static int64_t decode(const struct call *c, int sum)
{
    int64_t end = sum && c->type != FLOAT32 && c->type != BFLOAT16 ? 0 : check(c);
    if (!end)
        return 0;
    /* From here on the wire may change: the values may overlap it, or another process may write it. So all that is read
     * of it again is bounded again. */
    int64_t tile = read_u32(c->wire + 24);
    if (tile < STEP || tile > TILE)
        return -1;
    int64_t tiles = (c->count + tile - 1) / tile, place = directory_end(tiles);
    if (place > end)
        return -1;
    for (int64_t index = 0; index < tiles; index++) {
        const uint8_t *row = c->wire + HEADER + ENTRY * index;
        struct entry e = {read_u32(row + 8), row[16], read_u32(row + 12), row[17], row[18], read_u16(row + 20),
                          read_u16(row + 22)};
        int64_t first = index * tile, count = c->count - first < tile ? c->count - first : tile;
        if (count <= 0 || e.bytes % ALIGNMENT || place + e.bytes > end ||
            taccl_checksum(c->wire + place, e.bytes) != read_u64(row))
            return -1;
        void *into = sum ? c->spare : (uint8_t *)c->values + first * WIDTHS[c->type];
        if (!decode_tile(c, c->wire + place, &e, count, into))
            return -1;
        if (sum && c->type == FLOAT32)
            add((float *)c->values + first, into, count);
        else if (sum)
            add_short((float *)c->values + first, into, count);
        place += e.bytes;
    }
    return end;
}

int64_t taccl_decode(const struct call *c)
{
    return decode(c, 0);
}

int64_t taccl_accumulate(const struct call *c)
{
    return decode(c, 1);
}
