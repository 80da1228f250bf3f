// Runs a CUDA kernel on a CPU, to test its source where there is no GPU: the .cu file is compiled as C++ with this
// header in front (g++ -include) and takes its PTX helpers from here. A block is an operating-system thread, its CUDA
// threads are fibers that give way at warp and block barriers; a cluster's blocks run together. Copies land as late as
// they may: when the fiber waits for their group. Slow on purpose.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))

struct Index { unsigned x; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
using std::min;

constexpr int SHARED_BYTES = 1 << 18;
thread_local __align__(128) char shared[SHARED_BYTES]; // what `extern __shared__` names
inline thread_local Index threadIdx, blockIdx;

struct Warp { // what the lanes of a warp show one another
    float c[32][4];
    unsigned a[32][4], b[32][2];
    float value[32];
    int arrived = 0, turn = 0;
};
struct Copy { unsigned to; const void *from; bool zero; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    std::deque<std::vector<Copy>> groups{1}; // the last one is still open
};
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    ucontext_t scheduler;
    int running = 0, arrived = 0, turn = 0, alive = 0;
    std::function<void()> body;
};
struct Cluster { // blocks of a cluster: a barrier, and the first one's shared memory
    std::atomic<int> arrived{0};
    std::atomic<char *> base{nullptr};
    std::atomic<int64_t> expected{0}, received{0};
    int threads = 0;
};
inline thread_local Block *block;
inline thread_local Cluster *cluster;

inline void give_way() {
    Fiber &fiber = *block->fibers[block->running];
    swapcontext(&fiber.context, &block->scheduler);
    threadIdx.x = block->running;
}
inline void meet(int &arrived, int &turn, int parties) {
    int mine = turn;
    if (++arrived == parties) arrived = 0, turn++;
    while (turn == mine) give_way();
}
inline Warp &warp_of() { return block->warps[threadIdx.x / 32]; }
inline void __syncwarp() { meet(warp_of().arrived, warp_of().turn, 32); }
inline void __syncthreads() { meet(block->arrived, block->turn, (int)block->fibers.size()); }
inline float exchange(float v, int from) {
    Warp &w = warp_of();
    w.value[threadIdx.x % 32] = v;
    __syncwarp();
    float got = w.value[from];
    __syncwarp();
    return got;
}
inline float __shfl_xor_sync(unsigned, float v, int mask) { return exchange(v, (threadIdx.x % 32) ^ mask); }
inline float __shfl_sync(unsigned, float v, int from, int width) {
    return exchange(v, threadIdx.x % 32 / width * width + from % width);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
inline float as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
inline unsigned as_bits(float v) { unsigned u; memcpy(&u, &v, 4); return u; }

// ---- the .cu file's PTX helpers

inline unsigned shared_address(const void *p) { return unsigned((const char *)p - shared); }
template <class T> T &at_shared(unsigned p) { return *(T *)(shared + (int)p); }
inline void copy(unsigned to, const void *from, bool when, bool zero) {
    if (when) block->fibers[threadIdx.x]->groups.back().push_back({to, from, zero});
}
inline void copy_once(unsigned to, const void *from, unsigned long long, bool when, bool zero) {
    copy(to, from, when, zero);
}
inline unsigned long long evict_first() { return 0; }
inline void end_of_copies() { block->fibers[threadIdx.x]->groups.emplace_back(); }
template <int PENDING> void wait_for_copies() {
    auto &groups = block->fibers[threadIdx.x]->groups;
    while ((int)groups.size() - 1 > PENDING) {
        for (const Copy &c : groups.front())
            c.zero ? memset(shared + c.to, 0, 16) : memcpy(shared + c.to, c.from, 16);
        groups.pop_front();
    }
    __syncwarp();
}
inline uint4 load16(unsigned p) { return at_shared<uint4>(p); }
inline void load16_if(uint4 &v, unsigned p, bool when) { if (when) v = load16(p); }
inline uint2 load8(unsigned p) { return at_shared<uint2>(p); }
inline float to_float(unsigned half) { // float16
    unsigned sign = half >> 15 & 1, exponent = half >> 10 & 31, mantissa = half & 1023;
    float v = exponent == 0    ? std::ldexp((float)mantissa, -24)
              : exponent == 31 ? (mantissa ? NAN : INFINITY)
                               : std::ldexp(1024.f + mantissa, (int)exponent - 25);
    return sign ? -v : v;
}
inline float operand_half(unsigned v) { return BF16 ? as_float(v << 16) : to_float(v & 0xFFFF); }
inline unsigned short to_output(float v) { // rounded to nearest, ties to even
    if (BF16) {
        unsigned u = as_bits(v);
        return (unsigned short)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
    }
    float m = std::fabs(v);
    unsigned sign = as_bits(v) >> 31 << 15, r;
    if (!(m < 65520)) r = m != m ? 0x7E00 : 0x7C00;
    else {
        int e;
        std::frexp(m, &e);
        e = std::max(e, -13);
        unsigned n = (unsigned)std::nearbyint(std::ldexp(m, 11 - e)); // 1024 ... 2048, less where subnormal
        r = n + ((unsigned)(e + 13) << 10);
    }
    return (unsigned short)(sign | r);
}
inline void mma(float c[4], const unsigned a[4], unsigned b0, unsigned b1) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) w.a[lane][i] = a[i];
    w.b[lane][0] = b0, w.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = g + (i / 2) * 8, column = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) { // register and half that hold column k of A, row k of B
            unsigned ra = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], rb = w.b[column * 4 + k % 8 / 2][k / 8];
            sum += (double)operand_half(ra >> 16 * (k % 2)) * operand_half(rb >> 16 * (k % 2));
        }
        c[i] = (float)sum;
    }
    __syncwarp();
}
inline void cluster_arrive() { cluster->arrived++; }
inline void cluster_wait() { while (cluster->arrived < cluster->threads) give_way(), std::this_thread::yield(); }
inline void expect_bytes(unsigned, unsigned bytes) { cluster->base = shared, cluster->expected = bytes; }
inline void send(unsigned to, float value, unsigned) {
    memcpy(cluster->base + (int)to, &value, 4);
    cluster->received += 4;
}
inline void wait_for_bytes(unsigned) {
    while (cluster->received < cluster->expected) give_way(), std::this_thread::yield();
}

// ---- launch

inline void fiber_entry() {
    block->body();
    block->fibers[block->running]->done = true;
    block->alive--;
    swapcontext(&block->fibers[block->running]->context, &block->scheduler);
}
inline void run_block(unsigned index, unsigned threads, Cluster *of, const std::function<void()> &body) {
    Block mine;
    block = &mine, cluster = of, blockIdx.x = index;
    mine.body = body, mine.warps.resize(threads / 32), mine.alive = threads;
    memset(shared, 0xFF, SHARED_BYTES); // NaN
    for (unsigned i = 0; i < threads; i++) {
        mine.fibers.push_back(std::make_unique<Fiber>());
        Fiber &fiber = *mine.fibers.back();
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_entry, 0);
    }
    while (mine.alive)
        for (unsigned i = 0; i < threads; i++)
            if (!mine.fibers[i]->done) {
                mine.running = threadIdx.x = i;
                swapcontext(&mine.scheduler, &mine.fibers[i]->context);
            }
}
inline void run_grid(unsigned grid, unsigned threads, unsigned cluster_size, const std::function<void()> &body) {
    for (unsigned first = 0; first < grid; first += cluster_size) {
        Cluster together;
        together.threads = threads * cluster_size;
        std::vector<std::thread> blocks;
        for (unsigned i = 0; i < cluster_size; i++)
            blocks.emplace_back(run_block, first + i, threads, &together, std::cref(body));
        for (auto &b : blocks) b.join();
    }
}
