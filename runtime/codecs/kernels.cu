// Codecs on a GPU, byte for byte as the numpy modules: what all kernels use, and codecs of windows (xw), where one
// thread block codes or decodes one tile.
//
// Every kernel has the same parameters:
//   values   the values, input of encoders and output of decoders
//   count    their number; tile: values of a tile
//   wire     encoders: where tile 0 goes, tile b at b * stride; decoders: the start of the frame
//   stride   encoders: see above; decoders: where in the frame tile 0 starts, the others follow each other
//   entries  the directory, written by encoders
//   space    work space: of codecs of windows SPACE bytes for each value of a tile, for every block
//   status   decoders: what is wrong with each tile, 0 if nothing
//   task     of frames in frame memory (frames.cu), else null: where the frame lies, and where to say that it is wrong
//
// Only what CUDA has is used (no library), and only block and warp synchronisation, so that the file also compiles
// for the host behind a few definitions. A block has 256 to MOST_THREADS threads, a multiple of 32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define MOST_THREADS 1024
#define THREADS blockDim.x
#define MOST_WARPS (MOST_THREADS / 32)
#define WARPS (THREADS / 32)
#define SPACE 9
#define EVERYONE 0xffffffffu

enum { RAW, CODED, ZERO_MAP };
enum { SOUND, DAMAGED, WRONG_SPARSE, WRONG_POSITION, WRONG_ZERO_MAP };

struct Entry {
    u64 checksum;
    u32 bytes, kept;
    u8 mode, base, bits, zero;
    u16 sparse, exceptions;
};

// A frame in an area of frame memory, as the host expects it (TASK in device_frames.py).
struct Task {
    u8 header[64];  // without bytes and checksum, which are 0
    u64 begin;      // where the frame lies in its area: found by `find` or `seal_frame`
    u64 room;       // bytes of the area
    u64* head;      // in host memory: the head of the area again; null where areas have none
    u32* wrong;     // in host memory: set to 1 where the frame is not as expected
    u32 index;      // of the frame in its area
    u32 width;      // bytes of a value in windows; 0: tiles have one length
    u32 most, last; // bytes of a tile and of the last one, where tiles have one length
    u32 refused;    // set by `find`: nothing in the frame may be followed
    u32 zero;
};

__device__ inline u32 least(u32 a, u32 b) { return a < b ? a : b; }
__device__ inline u32 aligned(u32 bytes, u32 to) { return (bytes + to - 1) / to * to; }
__device__ inline u32 padded(u32 count) { return aligned(count, 64); }
__device__ inline u32 bits_of(float value) { union { float f; u32 u; } both; both.f = value; return both.u; }
__device__ inline float float_of(u32 bits) { union { float f; u32 u; } both; both.u = bits; return both.f; }

// Arithmetic as numpy's: rounded once each, never fused, and with subnormal numbers, which CuPy's compiler is told to
// make zeros.
#ifdef __CUDA_ARCH__
#define ROUNDED(name, instruction) \
    __device__ inline float name(float a, float b) { \
        float found; \
        asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b)); \
        return found; \
    }
ROUNDED(plus, "add")
ROUNDED(minus, "sub")
ROUNDED(times, "mul")
ROUNDED(over, "div")
#else
__device__ inline float plus(float a, float b) { return a + b; }
__device__ inline float minus(float a, float b) { return a - b; }
__device__ inline float times(float a, float b) { return a * b; }
__device__ inline float over(float a, float b) { return a / b; }
#endif

// ---------------------------------------------------------------------------------------------- all threads

// The sum over the block, for every thread.
__device__ u64 block_sum(u64 value) {
    __shared__ u64 parts[MOST_WARPS];
    for (u32 step = 16; step; step /= 2) value += __shfl_xor_sync(EVERYONE, value, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    u64 total = 0;
    for (u32 warp = 0; warp < WARPS; warp++) total += parts[warp];
    __syncthreads();
    return total;
}

__device__ u64 block_max(u64 value) {
    __shared__ u64 parts[MOST_WARPS];
    for (u32 step = 16; step; step /= 2) {
        u64 other = __shfl_xor_sync(EVERYONE, value, step);
        value = other > value ? other : value;
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    for (u32 warp = 0; warp < WARPS; warp++) value = parts[warp] > value ? parts[warp] : value;
    __syncthreads();
    return value;
}

// The sum over the threads before this one; *total: over all.
__device__ u32 block_scan(u32 value, u32* total) {
    __shared__ u32 parts[MOST_WARPS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(EVERYONE, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    u32 before = 0, all = 0;
    for (u32 each = 0; each < WARPS; each++) {
        if (each < warp) before += parts[each];
        all += parts[each];
    }
    __syncthreads();
    *total = all;
    return before + sum - value;
}

// The checksum of checksum.py, and what it adds for a word.
__device__ inline u64 summand(u32 index, u64 word) { return (2ull * index + 1) * (word ^ word >> 32); }

__device__ u64 checksum(const u8* data, u32 bytes) {
    const u64* words = (const u64*)data;
    u64 sum = 0;
    for (u32 i = threadIdx.x; i < bytes / 8; i += THREADS) sum += summand(i, words[i]);
    return block_sum(sum);
}

__device__ void copy(u8* target, const u8* source, u32 used, u32 size) {
    for (u32 i = threadIdx.x; i < size; i += THREADS) target[i] = i < used ? source[i] : 0;
}

// Write the entry of a tile whose bytes are all there.
__device__ void finish(Entry* entry, const u8* out, Entry found) {
    __syncthreads();
    found.checksum = checksum(out, found.bytes);
    if (threadIdx.x == 0) *entry = found;
}

__device__ Entry plain_entry(u32 bytes, u8 mode, u32 kept) {
    Entry entry = {0, bytes, kept, mode, 0, 0, 0, 0, 0};
    return entry;
}

__device__ u32 values_of(u64 count, u32 tile, u32 index) {
    u64 left = count - (u64)index * tile;
    return left < tile ? (u32)left : tile;
}

// Where the payload of this block's tile lies in a frame.
__device__ const u8* payload_of(const u8* frame, u64 start, const Entry* entries) {
    u64 before = 0;
    for (u32 i = threadIdx.x; i < blockIdx.x; i += THREADS) before += entries[i].bytes;
    return frame + start + block_sum(before);
}

__device__ void report(u32 what, u32 tile, u32* status, const Task* task) {
    if (threadIdx.x) return;
    if (!task)
        status[tile] = what;
    else if (what)
        *(volatile u32*)task->wrong = 1;
}

__device__ bool damaged(const u8* payload, const Entry& entry, u32* status, const Task* task) {
    bool wrong = checksum(payload, entry.bytes) != entry.checksum;
    report(wrong ? DAMAGED : SOUND, blockIdx.x, status, task);
    return wrong;
}

// ------------------------------------------------------------------------------------------------- xw: plan

#define SYMBOLS 256
#define MOST_BITS 6
#define FIRST_BITS 2
#define EXCEPTION_BITS 28
#define COLD_BITS 7
#define DEAR_BITS 6
#define MARGIN (4 << MOST_BITS)

struct Plan { u32 base, bits; };

template <typename Word> __device__ inline u32 top_half(Word word) { return (u32)word >> (8 * sizeof(Word) - 16); }

// choose_window of plan.py; kept > 0.
template <typename Word> __device__ Plan choose_window(const Word* words, u32 kept) {
    __shared__ u32 below[MARGIN + SYMBOLS + MARGIN];
    __shared__ u32 counts[SYMBOLS];
    __shared__ u32 cost[MOST_BITS + 1], place[MOST_BITS + 1];
    __shared__ Plan plan;
    u32 step = kept >> 10 | 1, sampled = (kept + step - 1) / step, t = threadIdx.x;
    if (t < SYMBOLS) counts[t] = 0;
    __syncthreads();
    for (u32 i = t; i < sampled; i += THREADS) atomicAdd(&counts[top_half(words[i * step]) >> 7 & 0xff], 1u);
    __syncthreads();
    u32 mine = t < SYMBOLS ? counts[t] : 0, total, before = block_scan(mine, &total);
    if (t < SYMBOLS) {  // the margins are as long
        below[t] = 0;
        below[MARGIN + t] = before + mine;
        below[MARGIN + SYMBOLS + t] = total;
    }
    __syncthreads();
    for (u32 bits = 0; bits <= MOST_BITS; bits++) {
        u32 width = 2u << bits, first = MARGIN - 1 - width;
        u64 best = 0;
        for (u32 i = t; i < SYMBOLS + width; i += THREADS) {
            u32 start = below[first + i], half = below[first + i + width], end = below[first + i + 2 * width];
            u64 worth = EXCEPTION_BITS * (end - half) + (EXCEPTION_BITS - COLD_BITS) * (half - start);
            u64 key = worth << 12 | (4095 - i);
            best = key > best ? key : best;
        }
        u32 at = first + 4095 - (u32)(block_max(best) & 4095);
        if (t == 0) {
            u32 hot = below[at + 2 * width] - below[at + width], cold = below[at + width] - below[at];
            u32 sparse = sampled / 8 + 8 * cold * sampled / (sampled + 5 * cold);
            cost[bits] = bits * sampled + sparse + EXCEPTION_BITS * (sampled - hot - cold);
            place[bits] = at + 1 - MARGIN;
        }
    }
    if (t == 0) {
        u32 bits = FIRST_BITS;
        while (bits > 0 && cost[bits - 1] < cost[bits]) bits--;
        while (bits < MOST_BITS && cost[bits + 1] < cost[bits]) bits++;
        if (cost[bits] > DEAR_BITS * sampled) {
            bits = 0;
            for (u32 other = 1; other <= MOST_BITS; other++) bits = cost[other] < cost[bits] ? other : bits;
        }
        plan.bits = bits;
        plan.base = place[bits] & 0xff;
    }
    __syncthreads();
    return plan;
}

// ------------------------------------------------------------------------------------------ xw: the sections

enum { MAP, LOW16, LOW, SIGNS, DENSE, USED, SPARSE, POSITIONS, TOPS, END, SECTIONS };

// Where the sections start (`sizes` of xw.py); [END] is their sum.
__device__ void sections(u32* at, u32 width, u32 count, const Entry& entry) {
    u32 room = padded(entry.kept);
    u32 sizes[END] = {
        entry.mode == ZERO_MAP ? padded(count) / 8 : 0, width == 4 ? 2 * room : 0, room, room / 8,
        entry.bits * room / 8, aligned(room / 64, 8), aligned(entry.sparse, 8),
        aligned(2 * (u32)entry.exceptions, 8), aligned(entry.exceptions, 8)};
    at[0] = 0;
    for (u32 i = 0; i < END; i++) at[i + 1] = at[i] + sizes[i];
}

// The dense fields of width 4, 2 and 1 that hold `bits` low bits, from lowest bit `low` on.
#define EACH_FIELD(bits) \
    for (u32 field = 4, low = 0, offset = 0; field; offset += (bits) & field ? room * field / 8 : 0, \
             low += (bits) & field, field /= 2) if ((bits) & field)

template <typename Word>
__device__ void encode_raw(const Word* words, u32 count, u8* out, Entry* entry) {
    u32 used = count * sizeof(Word), size = aligned(used, 16);
    __syncthreads();
    copy(out, (const u8*)words, used, size);
    finish(entry, out, plain_entry(size, RAW, count));
}

template <typename Word>
__device__ void encode_window(const Word* words, u32 count, u8* out, Entry* entry, u8* space, u32 tile) {
    __shared__ u8 flags[MOST_THREADS];
    u32 t = threadIdx.x, step = count >> 10 | 1, sampled = (count + step - 1) / step, total;
    Word* kept_space = (Word*)space;
    u16* positions = (u16*)(space + 4 * (u64)tile);
    u8* tops = space + 6 * (u64)tile;
    u64 zeros = 0;
    for (u32 i = t; i < sampled; i += THREADS) zeros += words[i * step] == 0;
    zeros = block_sum(zeros);
    Entry found = plain_entry(0, zeros * (sizeof(Word) == 2 ? 16 : 32) > sampled ? ZERO_MAP : CODED, count);
    const Word* source = words;
    if (found.mode == ZERO_MAP) {
        u32 running = 0;
        for (u32 first = 0; first < padded(count) / 8; first += THREADS) {
            u32 group = first + t, bits = 0;
            for (u32 i = 8 * group; i < 8 * group + 8 && i < count; i++) bits |= (words[i] != 0) << i % 8;
            u32 at = running + block_scan(__popc(bits), &total);
            if (group < padded(count) / 8) out[group] = (u8)bits;
            for (u32 i = 8 * group; i < 8 * group + 8; i++)
                if (bits >> i % 8 & 1) kept_space[at++] = words[i];
            running += total;
        }
        __syncthreads();
        found.kept = running;
        source = kept_space;
    }
    if (found.kept) {
        Plan plan = choose_window(source, found.kept);
        found.base = (u8)plan.base;
        found.bits = (u8)plan.bits;
    }
    u32 at[SECTIONS], room = padded(found.kept), limit = aligned(count * sizeof(Word), 16), bits = found.bits;
    sections(at, sizeof(Word), count, found);
    if (at[END] >= limit) return encode_raw(words, count, out, entry);

    u32 sparse = 0, exceptions = 0, shift = (u32)found.base << 7, beyond = 0x7f & ~((2u << bits) - 1);
    for (u32 first = 0; first < room / 8; first += THREADS) {
        u32 group = first + t, signs = 0, cold = 0, outside = 0;
        u64 low = 0;
        u8 top[8];
        bool here = group < room / 8;
        for (u32 j = 0; j < 8; j++) {
            u32 i = 8 * group + j, half = i < found.kept ? (top_half(source[i]) - shift) & 0xffff : 1u << bits << 8;
            if (!here) break;
            if (sizeof(Word) == 4) ((u16*)(out + at[LOW16]))[i] = i < found.kept ? (u16)source[i] : 0;
            top[j] = (u8)(half >> 8);
            low |= (u64)(half & 0xff) << 8 * j;
            signs |= (top[j] >> 7) << j;
            cold |= (~top[j] >> bits & 1) << j;
            outside |= ((top[j] & beyond) != 0) << j;
        }
        flags[t] = here && cold;
        u32 before = block_scan((here && cold ? 1u : 0u) | (u32)__popc(outside) << 16, &total);
        if (here) {
            *(u64*)(out + at[LOW] + 8 * group) = low;
            out[at[SIGNS] + group] = (u8)signs;
            if (cold) out[at[SPARSE] + sparse + (before & 0xffff)] = (u8)cold;
            u32 next = exceptions + (before >> 16);
            for (u32 j = 0; j < 8; j++)
                if (outside >> j & 1) {
                    positions[next] = (u16)(8 * group + j);
                    tops[next++] = top[j];
                }
        }
        // Room is a multiple of 64 values, so whole bytes of the map belong to whole groups.
        if (t < THREADS / 8 && first / 8 + t < room / 64) {
            u32 byte = 0;
            for (u32 j = 0; j < 8; j++) byte |= (u32)flags[8 * t + j] << j;
            out[at[USED] + first / 8 + t] = (u8)byte;
        }
        sparse += total & 0xffff;
        exceptions += total >> 16;
        __syncthreads();
    }
    if (exceptions > 0xffff) return encode_raw(words, count, out, entry);
    found.sparse = (u16)sparse;
    found.exceptions = (u16)exceptions;
    sections(at, sizeof(Word), count, found);
    found.bytes = aligned(at[END], 16);
    if (found.bytes >= limit) return encode_raw(words, count, out, entry);

    for (u32 i = at[USED] + room / 64 + t; i < at[SPARSE]; i += THREADS) out[i] = 0;
    for (u32 i = at[SPARSE] + sparse + t; i < at[POSITIONS]; i += THREADS) out[i] = 0;
    copy(out + at[POSITIONS], (const u8*)positions, 2 * exceptions, at[TOPS] - at[POSITIONS]);
    copy(out + at[TOPS], tops, exceptions, found.bytes - at[TOPS]);
    EACH_FIELD(bits) {
        u32 stride = field == 1 ? 1 : room * field / 8, mask = (1u << field) - 1;
        for (u32 i = t; i < room * field / 8; i += THREADS) {
            u32 byte = 0;
            for (u32 j = 0; j < 8 / field; j++) {
                u32 value = field == 1 ? 8 * i + j : i + j * stride;
                if (value < found.kept)
                    byte |= ((top_half(source[value]) - shift) >> (8 + low) & mask) << j * field;
            }
            // Values behind the last count as the first hot one, whose dense bits are 0.
            out[at[DENSE] + offset + i] = (u8)byte;
        }
    }
    finish(entry, out, found);
}

template <typename Word>
__device__ void decode_window(Word* words, u32 count, const u8* in, const Entry& entry, u8* space, u32* status,
                              const Task* task) {
    u32 t = threadIdx.x, at[SECTIONS], room = padded(entry.kept), total, running = 0, wrong = SOUND;
    Word* target = entry.mode == ZERO_MAP ? (Word*)space : words;
    u32 shift = (u32)entry.base << 7, bits = entry.bits;
    sections(at, sizeof(Word), count, entry);
    for (u32 first = 0; first < room / 8; first += THREADS) {
        u32 group = first + t;
        bool here = group < room / 8, used = here && in[at[USED] + group / 8] >> group % 8 & 1;
        u32 place = running + block_scan(used, &total);
        running += total;
        if (used && place >= entry.sparse) wrong = WRONG_SPARSE;
        u32 cold = used && place < entry.sparse ? in[at[SPARSE] + place] : 0;
        for (u32 j = 0; here && j < 8; j++) {
            u32 i = 8 * group + j, top = (~cold >> j & 1) << bits | (in[at[SIGNS] + group] >> j & 1) << 7;
            if (i >= entry.kept) break;
            EACH_FIELD(bits) {
                u32 stride = room * field / 8, mask = (1u << field) - 1;
                u32 byte = in[at[DENSE] + offset + (field == 1 ? group : i % stride)];
                top |= (byte >> (field == 1 ? j : i / stride * field) & mask) << low;
            }
            u32 half = (top << 8 | in[at[LOW] + i]) + shift & 0xffff;
            target[i] = sizeof(Word) == 2 ? (Word)half : (Word)(half << 16 | ((const u16*)(in + at[LOW16]))[i]);
        }
    }
    for (u32 i = room / 8 + t; i < 8 * (at[SPARSE] - at[USED]); i += THREADS)
        if (in[at[USED] + i / 8] >> i % 8 & 1) wrong = WRONG_SPARSE;
    if (running != entry.sparse) wrong = WRONG_SPARSE;
    __syncthreads();
    for (u32 i = t; i < entry.exceptions; i += THREADS) {
        const u16* positions = (const u16*)(in + at[POSITIONS]);
        u32 place = positions[i];
        if (place >= entry.kept || (i && place <= positions[i - 1])) {
            wrong = WRONG_POSITION;
            continue;
        }
        u32 half = ((u32)in[at[TOPS] + i] << 8 | in[at[LOW] + place]) + shift & 0xffff;
        target[place] = sizeof(Word) == 2 ? (Word)half : (Word)(half << 16 | (target[place] & 0xffff));
    }
    __syncthreads();
    if (entry.mode == ZERO_MAP) {
        running = 0;
        for (u32 first = 0; first < padded(count) / 8; first += THREADS) {
            u32 group = first + t, map = group < padded(count) / 8 ? in[group] : 0;
            u32 next = running + block_scan(__popc(map), &total);
            running += total;
            for (u32 i = 8 * group; i < 8 * group + 8; i++) {
                bool set = map >> i % 8 & 1;
                if (set && (i >= count || next >= entry.kept)) wrong = WRONG_ZERO_MAP;
                if (i < count) words[i] = set && next < entry.kept ? target[next] : 0;
                next += set;
            }
        }
        if (running != entry.kept) wrong = WRONG_ZERO_MAP;
    }
    report((u32)block_max(wrong), blockIdx.x, status, task);
}

// ------------------------------------------------------------------------------------------- single values

__device__ inline u16 to_bfloat16(float value) {
    u32 bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (u16)(bits >> 16 & 0x8000 | 0x7fc0);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ void round_to_bfloat16(const float* values, u32 count, u16* halves) {
    for (u32 i = threadIdx.x; i < count; i += THREADS) halves[i] = to_bfloat16(values[i]);
}

__device__ void widen(const u16* halves, u32 count, float* values) {
    for (u32 i = threadIdx.x; i < count; i += THREADS) values[i] = float_of((u32)halves[i] << 16);
}

__device__ inline float half_to_float(u16 half) {
    u32 exponent = half >> 10 & 31, mantissa = half & 1023, sign = (u32)(half >> 15) << 31;
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    float size = times((float)mantissa, 0x1p-24f);
    return float_of(bits_of(size) | sign);
}

// --------------------------------------------------------------------------------------------------- kernels

#define PARAMETERS \
    u8 *values, u64 count, u32 tile, u8 *wire, u64 stride, Entry *entries, u8 *space, u32 *status, Task *task
#define MINE (space + (u64)blockIdx.x * tile * SPACE)
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(MOST_THREADS) name(PARAMETERS)

#define ENCODER(name, Value, body) \
    KERNEL(name) { \
        u32 here = values_of(count, tile, blockIdx.x); \
        const Value* from = (const Value*)values + (u64)blockIdx.x * tile; \
        u8* out = wire + blockIdx.x * stride; \
        Entry* entry = entries + blockIdx.x; \
        body \
    }

// `find` has looked at the directory before a decoder follows it.
#define FOLLOW_TASK \
    if (task) { \
        if (task->refused) return; \
        wire += task->begin; \
        entries = (Entry*)(wire + sizeof(task->header)); \
    }

#define DECODER(name, Value, body) \
    KERNEL(name) { \
        FOLLOW_TASK \
        u32 here = values_of(count, tile, blockIdx.x); \
        Value* to = (Value*)values + (u64)blockIdx.x * tile; \
        Entry entry = entries[blockIdx.x]; \
        const u8* in = payload_of(wire, stride, entries); \
        if (damaged(in, entry, status, task)) return; \
        if (entry.mode == RAW) \
            copy((u8*)to, in, here * sizeof(Value), here * sizeof(Value)); \
        else { body } \
    }

ENCODER(raw_encode_1, u8, encode_raw(from, here, out, entry);)
ENCODER(raw_encode_2, u16, encode_raw(from, here, out, entry);)
ENCODER(raw_encode_4, u32, encode_raw(from, here, out, entry);)
ENCODER(raw_encode_8, u64, encode_raw(from, here, out, entry);)
DECODER(raw_decode_1, u8, )
DECODER(raw_decode_2, u16, )
DECODER(raw_decode_4, u32, )
DECODER(raw_decode_8, u64, )
ENCODER(xw_encode_2, u16, encode_window(from, here, out, entry, MINE, tile);)
ENCODER(xw_encode_4, u32, encode_window(from, here, out, entry, MINE, tile);)
DECODER(xw_decode_2, u16, decode_window(to, here, in, entry, MINE, status, task);)
DECODER(xw_decode_4, u32, decode_window(to, here, in, entry, MINE, status, task);)

ENCODER(bf16_xw_encode_4, float, {
    u16* halves = (u16*)(MINE + 7 * (u64)tile);
    round_to_bfloat16(from, here, halves);
    __syncthreads();
    encode_window(halves, here, out, entry, MINE, tile);
})

KERNEL(bf16_xw_decode_4) {
    FOLLOW_TASK
    u32 here = values_of(count, tile, blockIdx.x);
    float* to = (float*)values + (u64)blockIdx.x * tile;
    Entry entry = entries[blockIdx.x];
    const u8* in = payload_of(wire, stride, entries);
    u16* halves = (u16*)(MINE + 7 * (u64)tile);
    if (damaged(in, entry, status, task)) return;
    if (entry.mode == RAW)
        copy((u8*)halves, in, 2 * here, 2 * here);
    else
        decode_window(halves, here, in, entry, MINE, status, task);
    __syncthreads();
    widen(halves, here, to);
}

// For plug-ins, whose streams lie in the frame already: write their checksums into the directory, or check them.
KERNEL(seal) {
    const u8* payload = payload_of(wire, stride, entries);
    u64 sum = checksum(payload, entries[blockIdx.x].bytes);
    if (threadIdx.x == 0) entries[blockIdx.x].checksum = sum;
}

KERNEL(check) { damaged(payload_of(wire, stride, entries), entries[blockIdx.x], status, task); }

// Move the tiles of `values`, `stride` apart, to where they follow each other in `wire`.
KERNEL(gather) {
    u32 bytes = entries[blockIdx.x].bytes;
    const u64* from = (const u64*)(values + blockIdx.x * stride);
    u64* to = (u64*)payload_of(wire, 0, entries);
    for (u32 i = threadIdx.x; i < bytes / 8; i += THREADS) to[i] = from[i];
}

// Add `count` values to the float32 in `wire`: the sum at a chunk's owner.
#define ADDER(name, Value, widened) \
    KERNEL(name) { \
        u32 here = values_of(count, tile, blockIdx.x); \
        const Value* from = (const Value*)values + (u64)blockIdx.x * tile; \
        float* total = (float*)wire + (u64)blockIdx.x * tile; \
        for (u32 i = threadIdx.x; i < here; i += THREADS) total[i] = plus(total[i], widened); \
    }

ADDER(add_float32, float, from[i])
ADDER(add_bfloat16, u16, float_of((u32)from[i] << 16))
ADDER(add_float16, u16, half_to_float(from[i]))
