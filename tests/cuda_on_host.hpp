// Enough of CUDA to run kernels on the host: every thread of a block is a fibre, blocks run one after another.
// Included in front of kernels.cu. Shared memory is static, as there is only one block at a time.
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <ucontext.h>

#define __device__
#define __global__
#define __shared__ static
#define __popc __builtin_popcount
#define __launch_bounds__(threads)

struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim;

static const unsigned FIBRES = 1024;
static const size_t STACK_BYTES = 64 << 10;

struct Barrier { unsigned arrived, round; };
static Barrier block_barrier, warp_barrier[FIBRES / 32];
static Barrier* waits_at[FIBRES];
static unsigned waits_in[FIBRES];  // which round
static unsigned threads;
static ucontext_t scheduler, starts[FIBRES];
static jmp_buf back, places[FIBRES];
static bool started[FIBRES], ended[FIBRES];
static unsigned long long exchanged[FIBRES];
static char* stacks;

static void __attribute__((noinline)) pause_thread() {
    if (!_setjmp(places[threadIdx.x])) _longjmp(back, 1);
}

static void wait_at(Barrier& barrier, unsigned expected) {
    unsigned round = barrier.round;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        barrier.round++;
        return;
    }
    waits_at[threadIdx.x] = &barrier;
    waits_in[threadIdx.x] = round;
    pause_thread();  // nothing resumes it before that round is over
}

static void __syncthreads() { wait_at(block_barrier, threads); }

template <typename T> static T exchange(T value, unsigned source) {
    unsigned warp = threadIdx.x / 32;
    exchanged[threadIdx.x] = value;
    wait_at(warp_barrier[warp], 32);
    T found = (T)exchanged[source];
    wait_at(warp_barrier[warp], 32);
    return found;
}

template <typename T> static T __shfl_xor_sync(unsigned, T value, unsigned step) {
    return exchange(value, threadIdx.x ^ step);
}

template <typename T> static T __shfl_up_sync(unsigned, T value, unsigned step) {
    return exchange(value, threadIdx.x % 32 < step ? threadIdx.x : threadIdx.x - step);
}

static void __threadfence() {}

template <typename T> static T atomicAdd(T* place, T value) {
    T before = *place;
    *place += value;
    return before;
}

template <typename T> static T atomicExch(T* place, T value) {
    T before = *place;
    *place = value;
    return before;
}

static unsigned atomicInc(unsigned* place, unsigned most) {
    unsigned before = *place;
    *place = before >= most ? 0 : before + 1;
    return before;
}

typedef void (*Kernel)(unsigned char*, unsigned long long, unsigned, unsigned char*, unsigned long long, void*,
                       unsigned char*, unsigned*, void*);
static struct {
    Kernel kernel;
    unsigned char *values, *wire, *space;
    unsigned long long count, stride;
    unsigned tile, *status;
    void *entries, *task;
} job;

static void run_thread() {
    job.kernel(job.values, job.count, job.tile, job.wire, job.stride, job.entries, job.space, job.status,
               job.task);
    ended[threadIdx.x] = true;
    _longjmp(back, 1);
}

extern "C" void launch(Kernel kernel, unsigned blocks, unsigned block_threads, unsigned char* values,
                       unsigned long long count, unsigned tile, unsigned char* wire, unsigned long long stride,
                       void* entries, unsigned char* space, unsigned* status, void* task) {
    job = {kernel, values, wire, space, count, stride, tile, status, entries, task};
    threads = blockDim.x = block_threads;
    if (!stacks) stacks = (char*)malloc(FIBRES * STACK_BYTES);
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned i = 0; i < threads; i++) started[i] = ended[i] = false;
        static volatile unsigned left, next;
        for (left = threads; left;) {
            left = 0;
            for (next = 0; next < threads; next = next + 1) {
                if (ended[next]) continue;
                left = left + 1;
                if (started[next] && waits_at[next]->round == waits_in[next]) continue;
                threadIdx.x = next;
                if (_setjmp(back)) continue;
                if (started[next]) _longjmp(places[next], 1);
                started[next] = true;
                getcontext(&starts[next]);
                starts[next].uc_stack.ss_sp = stacks + next * STACK_BYTES;
                starts[next].uc_stack.ss_size = STACK_BYTES;
                starts[next].uc_link = 0;
                makecontext(&starts[next], run_thread, 0);
                swapcontext(&scheduler, &starts[next]);
            }
        }
    }
}
