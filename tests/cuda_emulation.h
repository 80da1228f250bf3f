// Runs a CUDA kernel on a CPU, to test its source where there is no GPU: the .cu file is compiled as C++ with this
// header in front (g++ -include), which takes the place of kernels/ptx.cuh. A block is an operating-system thread, its
// CUDA threads are fibers that give way at warp and block barriers; a cluster's blocks run together. Copies land as late
// as they may: when the fiber waits for their group. Slow on purpose.
#pragma once
#define PTX_CUH
#undef _FORTIFY_SOURCE // whose longjmp takes another fiber's stack for a damaged one
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#define INLINE inline
#define UNROLL

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
struct Index { unsigned x; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
using std::max;
using std::min;

constexpr int SHARED_BYTES = 1 << 18;
thread_local __align__(128) char shared[SHARED_BYTES]; // what `extern __shared__` names
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

struct Warp { // what the lanes of a warp show one another
    float c[32][4];
    unsigned a[32][4], b[32][2];
    u32 value[32];
    int arrived = 0, turn = 0;
};
struct Copy { unsigned to; const void *from; bool zero; int bytes = 16; };
struct Fiber {
    ucontext_t beginning;
    jmp_buf now; // swapcontext would ask the kernel for signals twice a turn
    std::unique_ptr<char[]> stack{new char[1 << 16]};
    bool begun = false;
    bool done = false;
    int cluster_barriers = 0;
    std::deque<std::vector<Copy>> groups{1}; // the last one is still open
    std::deque<std::vector<std::function<void()>>> products{1}; // as well
};
struct Signal {
    u32 count = 0, arrived = 0, turn = 0;
    int64_t bytes = 0;         // that the phase waits for
    std::vector<Copy> copies;  // bulk copies that have not landed
    void end_phase() { if (arrived == count && bytes == 0) arrived = 0, turn++; }
};
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    jmp_buf scheduler;
    int running = 0, alive = 0;
    struct { int arrived = 0, turn = 0; } barriers[16];
    std::map<u32, Signal> signals; // by their addresses
    std::function<void()> body;
};
struct Arrivals { int64_t expected = 0, received = 0; };
struct Member { // a block, as the others of its cluster see it
    char *base = nullptr;
    std::mutex lock;
    std::map<u32, Arrivals> arrivals; // by the address of the counter
    std::vector<std::function<void()>> posts; // what others do to its signals, when it waits for one
    template <class F> bool with(u32 counter, F f) {
        std::lock_guard<std::mutex> guard(lock);
        return f(arrivals[counter]);
    }
};
struct Cluster {
    std::atomic<int> started{0}, arrived{0};
    int threads = 0;
    std::vector<Member> members;
};
// Every read of global memory is checked against the tensors that the kernel was given.
struct Tensor { const char *from, *to; };
inline std::vector<Tensor> tensors;
inline std::atomic<int> outside{0}; // reads of something else
inline void check_read(const void *p, int bytes) {
    for (const Tensor &t : tensors)
        if ((const char *)p >= t.from && (const char *)p + bytes <= t.to) return;
    outside++;
}
inline thread_local Block *block;
inline thread_local Cluster *cluster;
inline thread_local u32 rank_here;

inline void give_way() {
    Fiber &fiber = *block->fibers[block->running];
    if (_setjmp(fiber.now) == 0) _longjmp(block->scheduler, 1);
    threadIdx.x = block->running;
}
inline void meet(int &arrived, int &turn, int parties) {
    int mine = turn;
    if (++arrived == parties) arrived = 0, turn++;
    while (turn == mine) give_way();
}
inline Warp &warp_of() { return block->warps[threadIdx.x / 32]; }
inline void __syncwarp() { meet(warp_of().arrived, warp_of().turn, 32); }
inline void barrier(u32 which, u32 threads) {
    meet(block->barriers[which].arrived, block->barriers[which].turn, threads);
}
inline void signal_init(u32 p, u32 count) { block->signals[p] = {count}; }
inline void signal_arrive(u32 p) {
    Signal &s = block->signals[p];
    s.arrived++, s.end_phase();
}
inline void signal_expect(u32 p, u32 bytes) {
    block->signals[p].bytes += bytes;
    signal_arrive(p);
}
inline void show_signals() {}
inline void copy_bulk(u32 to, const void *from, u32 bytes, u32 p, u64) {
    if (to % 16 || (u64)from % 16 || bytes % 16) std::abort();
    block->signals[p].copies.push_back({to, from, false, (int)bytes});
}
inline void post(u32 rank, std::function<void()> what) {
    Member &there = cluster->members[rank];
    std::lock_guard<std::mutex> guard(there.lock);
    there.posts.push_back(std::move(what));
}
inline void take_posts() {
    std::vector<std::function<void()>> posts;
    {
        std::lock_guard<std::mutex> guard(cluster->members[rank_here].lock);
        posts.swap(cluster->members[rank_here].posts);
    }
    for (auto &what : posts) what();
}
inline void signal_arrive(u32 p, u32 rank) { post(rank, [=] { signal_arrive(p); }); }
struct alignas(64) TensorMap { u64 address, rows, columns, box, rest[12]; }; // in place of what the driver encodes
inline void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 p, u32 blocks) {
    if (to % 1024 || map->address % 16 || map->columns % 8) std::abort();
    std::vector<Copy> copies; // pieces of 16 bytes
    for (u32 r = 0; r < map->box; r++)
        for (u32 piece = 0; piece < 8; piece++) {
            const u32 at = column + piece * 8;
            const bool none = row + r >= map->rows || at >= map->columns;
            const char *from = (const char *)map->address + ((row + r) * map->columns + at) * 2;
            copies.push_back({to + r * 128 + (piece ^ r % 8) * 16, from, none});
        }
    for (u32 rank = 0; blocks >> rank; rank++)
        if (blocks >> rank & 1) post(rank, [=] {
            auto &there = block->signals[p].copies;
            there.insert(there.end(), copies.begin(), copies.end());
        });
}
inline void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 p) {
    copy_box(to, map, column, row, p, 1u << rank_here);
}
inline void signal_wait(u32 p, u32 turn) { // lands bulk copies, as late as they may
    Signal &s = block->signals[p];
    for (take_posts(); (s.turn - 1 - turn) % 2; take_posts()) {
        for (const Copy &c : s.copies) {
            if (!c.zero) check_read(c.from, c.bytes);
            c.zero ? memset(shared + c.to, 0, c.bytes) : memcpy(shared + c.to, c.from, c.bytes);
            s.bytes -= c.bytes;
        }
        bool landed = s.copies.size();
        s.copies.clear();
        if (landed) s.end_phase();
        else give_way(), std::this_thread::yield();
    }
}
inline void __syncthreads() { barrier(0, block->fibers.size()); }
inline float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 as_bits(float v) { u32 u; memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(u32 v) { return as_float(v); }
inline u32 __float_as_uint(float v) { return as_bits(v); }
inline float exchange(float v, int from) {
    Warp &w = warp_of();
    w.value[threadIdx.x % 32] = as_bits(v);
    __syncwarp();
    float got = as_float(w.value[from]);
    __syncwarp();
    return got;
}
inline float __shfl_xor_sync(unsigned, float v, int mask) { return exchange(v, (threadIdx.x % 32) ^ mask); }
inline u32 __shfl_xor_sync(unsigned, u32 v, int mask) {
    return as_bits(exchange(as_float(v), (threadIdx.x % 32) ^ mask));
}
inline float __shfl_sync(unsigned, float v, int from, int width) {
    return exchange(v, threadIdx.x % 32 / width * width + from % width);
}
inline u32 __shfl_sync(unsigned, u32 v, int from, int width) {
    return as_bits(__shfl_sync(0, as_float(v), from, width));
}
inline u32 __reduce_max_sync(unsigned, u32 v) {
    Warp &w = warp_of();
    w.value[threadIdx.x % 32] = v;
    __syncwarp();
    u32 got = *std::max_element(w.value, w.value + 32);
    __syncwarp();
    return got;
}
inline u32 __reduce_add_sync(unsigned, u32 v) {
    Warp &w = warp_of();
    w.value[threadIdx.x % 32] = v;
    __syncwarp();
    u32 got = std::accumulate(w.value, w.value + 32, 0u);
    __syncwarp();
    return got;
}
inline u32 __ballot_sync(unsigned, bool v) { return __reduce_add_sync(0, u32(v) << threadIdx.x % 32); }
inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float reciprocal(float v) { return std::nextafter(1 / v, 0); } // as far off as the instruction may be
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline int atomicAdd(int *to, int v) { int old = *to; *to += v; return old; } // fibers of one thread
inline float atomicAdd(float *to, float v) { float old = *to; *to += v; return old; }
inline void __threadfence() {} // blocks of a grid run one after the other
template <class T> T __ldg(const T *p) { check_read(p, sizeof(T)); return *p; }
template <class T> T __ldcg(const T *p) { return __ldg(p); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}

// ---- kernels/ptx.cuh

inline unsigned shared_address(const void *p) { return unsigned((const char *)p - shared); }
template <class T> T &at_shared(unsigned p) { return *(T *)(shared + (int)p); }
inline void copy(unsigned to, const void *from, bool when, bool zero) {
    if (when) block->fibers[threadIdx.x]->groups.back().push_back({to, from, zero});
}
inline void copy_once(unsigned to, const void *from, unsigned long long, bool when, bool zero) {
    copy(to, from, when, zero);
}
template <int BYTES> void copy_few(unsigned to, const void *from, bool when, bool zero) {
    if (when) block->fibers[threadIdx.x]->groups.back().push_back({to, from, zero, BYTES});
}
inline void copy_past_l1(unsigned to, const void *from, bool zero) { copy(to, from, true, zero); }
inline u64 evict_first() { return 0; }
inline u64 evict_normal() { return 0; }
inline uint4 load_past_l1(const void *p, u64) { check_read(p, 16); return *(const uint4 *)p; }
inline uint4 load_early(const void *p) { check_read(p, 16); return *(const uint4 *)p; }
inline void bring_to_l2(const void *p) { check_read(p, 1); }
template <int BYTES> u32 load_early_if(const void *p, bool when) {
    u32 v = 0;
    if (when) check_read(p, BYTES), memcpy(&v, p, BYTES);
    return v;
}
inline void end_of_copies() { block->fibers[threadIdx.x]->groups.emplace_back(); }
template <int PENDING> void wait_for_copies() {
    auto &groups = block->fibers[threadIdx.x]->groups;
    while ((int)groups.size() - 1 > PENDING) {
        for (const Copy &c : groups.front()) {
            if (!c.zero) check_read(c.from, c.bytes);
            c.zero ? memset(shared + c.to, 0, c.bytes) : memcpy(shared + c.to, c.from, c.bytes);
        }
        groups.pop_front();
    }
}
inline u32 load_byte(unsigned p) { return at_shared<unsigned char>(p); }
inline float load4(unsigned p) { return at_shared<float>(p); }
inline uint4 load16(unsigned p) { return at_shared<uint4>(p); }
inline void load_few(u32 (&v)[2], unsigned p) { *(uint2 *)v = at_shared<uint2>(p); }
inline void load_few(u32 (&v)[1], unsigned p) { v[0] = at_shared<u32>(p); }
inline void store_matrices(unsigned p, uint4 v) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32;
    w.value[lane] = p;
    __syncwarp();
    for (int i = 0; i < 4; i++) at_shared<u32>(w.value[8 * i + lane / 4] + lane % 4 * 4) = (&v.x)[i];
    __syncwarp();
}
inline void store8(unsigned p, uint2 v) { at_shared<uint2>(p) = v; }
inline void store16(unsigned p, uint4 v) { at_shared<uint4>(p) = v; }
inline void store16(unsigned p, float4 v) { at_shared<float4>(p) = v; }
inline void load16_if(uint4 &v, unsigned p, bool when) { if (when) v = load16(p); }
inline uint2 load8(unsigned p) { return at_shared<uint2>(p); }
inline float half_to_float(u32 half) {
    u32 sign = half >> 15 & 1, exponent = half >> 10 & 31, mantissa = half & 1023;
    float v = exponent == 0    ? std::ldexp((float)mantissa, -24)
              : exponent == 31 ? (mantissa ? NAN : INFINITY)
                               : std::ldexp(1024.f + mantissa, (int)exponent - 25);
    return sign ? -v : v;
}
template <int BRAIN> float to_float(u32 v) { return BRAIN ? as_float(v << 16) : half_to_float(v & 0xFFFF); }
template <int BRAIN> u16 to_half(double v) { // rounded once, to nearest, ties to even
    double m = std::fabs(v);
    u16 sign = std::signbit(v) << 15;
    const int digits = BRAIN ? 8 : 11, least = BRAIN ? -125 : -13, most = BRAIN ? 128 : 16;
    const u16 infinity = BRAIN ? 0x7F80 : 0x7C00;
    if (m != m) return infinity | 1;
    if (m == 0) return sign;
    int e;
    std::frexp(m, &e);
    e = max(e, least);
    double n = std::nearbyint(std::ldexp(m, digits - e)); // 2^(digits-1) ... 2^digits, less where subnormal
    if (std::isinf(m) || std::ldexp(n, e - digits) >= std::ldexp(1.0, most)) return sign | infinity;
    return sign | (u16)((u32)n + ((u32)(e - least) << (digits - 1)));
}
template <int BRAIN> u32 to_halves(double low, double high) {
    return to_half<BRAIN>(low) | (u32)to_half<BRAIN>(high) << 16;
}
template <int BRAIN> u32 multiply_add(u32 a, u32 b, u32 c) {
    auto one = [](u32 p, u32 q, u32 r) { return (double)to_float<BRAIN>(p) * to_float<BRAIN>(q) + to_float<BRAIN>(r); };
    return to_halves<BRAIN>(one(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF), one(a >> 16, b >> 16, c >> 16));
}
template <int BRAIN> u32 multiply(u32 a, u32 b) { return multiply_add<BRAIN>(a, b, 0x80008000); }
template <int BRAIN> void mma(float c[4], const unsigned a[4], unsigned b0, unsigned b1) {
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
            sum += (double)to_float<BRAIN>(ra >> 16 * (k % 2)) * to_float<BRAIN>(rb >> 16 * (k % 2));
        }
        c[i] = (float)sum;
    }
    __syncwarp();
}
inline u32 transpose(u32 pair) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    w.value[lane] = pair;
    __syncwarp();
    auto at = [&](int row) { return w.value[row * 4 + g / 2] >> 16 * (g % 2) & 0xFFFF; };
    u32 got = at(2 * t) | at(2 * t + 1) << 16;
    __syncwarp();
    return got;
}
inline u32 matrix(u32 p) { return p / 16; }
// As late as it may be, when the fiber waits for the group: until then it reads `a` and shared memory.
template <int BRAIN, int N> void wgmma(float (*d)[4], const unsigned a[4], unsigned b) {
    block->fibers[threadIdx.x]->products.back().push_back([=] {
        auto element = [&](int row, int k) { // of B
            unsigned p = b * 16 + row * 128 + k * 2;
            return (u32)at_shared<u32>(p ^ (p >> 7 & 7) << 4);
        };
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        for (int n = 0; n < N / 8; n++) mma<BRAIN>(d[n], a, element(n * 8 + g, 2 * t), element(n * 8 + g, 2 * t + 8));
    });
}
inline void begin_next() {}
inline void wait_for_launch_before() {}
template <int> void fewer_registers() {}
template <int> void more_registers() {}
inline u32 load_word(unsigned p) { return at_shared<u32>(p); }
inline void wgmma_begin() {}
inline void wgmma_end() { block->fibers[threadIdx.x]->products.emplace_back(); }
template <int PENDING> void wgmma_wait() {
    auto &groups = block->fibers[threadIdx.x]->products;
    for (; (int)groups.size() - 1 > PENDING; groups.pop_front())
        for (auto &product : groups.front()) product();
    __syncwarp(); // `.sync`: no lane goes on before every lane of its warp has waited
}
inline void show_matrix_unit() {}
inline void mma_int8(int c[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    w.a[lane][0] = a0, w.a[lane][1] = a2, w.b[lane][0] = b0, w.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 32; k++) { // register and byte that hold column k of A, row k of B
            u32 ra = w.a[g * 4 + k % 16 / 4][k / 16], rb = w.b[(2 * t + i) * 4 + k % 16 / 4][k / 16];
            c[i] += int8_t(ra >> 8 * (k % 4)) * int8_t(rb >> 8 * (k % 4));
        }
    __syncwarp();
}
inline void count_common(int c[4], const u32 a[4], u32 b0, u32 b1) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) w.a[lane][i] = a[i];
    w.b[lane][0] = b0, w.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 4; i++)
        for (int word = 0; word < 8; word++) { // of 32 columns of A, rows of B
            u32 of_a = w.a[g * 4 + word % 4][i / 2 + word / 4 * 2], of_b = w.b[(2 * t + i % 2) * 4 + word % 4][word / 4];
            c[i] += __builtin_popcount(of_a & of_b);
        }
    __syncwarp();
}
inline void count_common(int c[4], u32 a0, u32 a1, u32 b) { // the other half of A and B is 0
    const u32 a[4] = {a0, a1, 0, 0};
    count_common(c, a, b, 0);
}
inline float __fadd_rd(volatile float a, volatile float b) { // rounded down
    fesetround(FE_DOWNWARD);
    volatile float sum = a + b;
    fesetround(FE_TONEAREST);
    return sum;
}
template <int BRAIN, class F> u32 of_halves(u32 a, u32 b, F f) { // f of two floats gives 16 bits
    u16 low = f(to_float<BRAIN>(a & 0xFFFF), to_float<BRAIN>(b & 0xFFFF));
    u16 high = f(to_float<BRAIN>(a >> 16), to_float<BRAIN>(b >> 16));
    return low | (u32)high << 16;
}
template <int BRAIN> u32 least(u32 a, u32 b) {
    return of_halves<BRAIN>(a, b, [](float p, float q) { return to_half<BRAIN>(fminf(p, q)); });
}
inline float most(float a, float b) { return std::isnan(a) ? a : std::isnan(b) ? b : std::fmax(a, b); }
template <int BRAIN> u32 most(u32 a, u32 b) {
    return of_halves<BRAIN>(a, b, [](float p, float q) { return to_half<BRAIN>(most(p, q)); });
}
template <int BRAIN> u32 at_least(u32 a, u32 b) {
    return of_halves<BRAIN>(a, b, [](float p, float q) { return u16(p >= q ? 0xFFFF : 0); });
}
template <int BRAIN> u32 half_above(float v) {
    u16 h = to_half<BRAIN>(v);
    for (float f = to_float<BRAIN>(h); f < v; f = to_float<BRAIN>(h)) h = h == 0x8000 ? 1 : h >> 15 ? h - 1 : h + 1;
    return h;
}
inline u32 from_e4m3(u32 two) { // exponent and mantissa as those of a small float16
    auto one = [](u32 byte) { return std::ldexp(half_to_float((byte & 0x7F) << 7), 8); };
    return to_halves<0>(one(two), one(two >> 8));
}
inline u32 kept(u32 v) { return v; }
template <class T> const T *kept(const T *p) { return p; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline float __fmaf_ru(float a, float b, float c) { // exact in double for factors of a few bits
    double exact = (double)a * b + c;
    float rounded = (float)exact;
    return (double)rounded < exact ? std::nextafter(rounded, INFINITY) : rounded;
}
inline void cluster_arrive() { cluster->arrived++; }
inline void cluster_wait() { // for the barrier's next end: threads of a cluster arrive once for each
    int ends = ++block->fibers[threadIdx.x]->cluster_barriers;
    while (cluster->arrived < cluster->threads * ends) give_way(), std::this_thread::yield();
}
inline void cluster_barrier() { cluster_arrive(), cluster_wait(); }
inline void expect_bytes(u32 counter, u32 bytes) {
    cluster->members[rank_here].with(counter, [=](Arrivals &a) { return a.expected = bytes; });
}
template <class T> void send(u32 to, T value, u32 counter, u32 rank) {
    Member &there = cluster->members[rank];
    memcpy(there.base + (int)to, &value, sizeof value);
    there.with(counter, [](Arrivals &a) { return a.received += sizeof(T); });
}
inline void wait_for_bytes(u32 counter) {
    auto all = [](Arrivals &a) { return a.received >= a.expected; };
    while (!cluster->members[rank_here].with(counter, all)) give_way(), std::this_thread::yield();
}

// ---- launch

inline void fiber_entry() {
    block->body();
    block->fibers[block->running]->done = true;
    block->alive--;
    _longjmp(block->scheduler, 1);
}
// Until the fiber gives way or ends.
inline __attribute__((noinline)) void run_on(Block &mine, Fiber &fiber) {
    if (_setjmp(mine.scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.now, 1);
    fiber.begun = true;
    setcontext(&fiber.beginning);
}
inline void run_block(u32 index, u32 rank, u32 grid, u32 threads, Cluster *of, const std::function<void()> &body) {
    Block mine;
    block = &mine, cluster = of, rank_here = rank, blockIdx.x = index, gridDim.x = grid, blockDim.x = threads;
    mine.body = body, mine.warps.resize(threads / 32), mine.alive = threads;
    memset(shared, 0xFF, SHARED_BYTES); // NaN
    for (unsigned i = 0; i < threads; i++) {
        mine.fibers.push_back(std::make_unique<Fiber>());
        Fiber &fiber = *mine.fibers.back();
        getcontext(&fiber.beginning);
        fiber.beginning.uc_stack.ss_sp = fiber.stack.get(), fiber.beginning.uc_stack.ss_size = 1 << 16;
        fiber.beginning.uc_link = nullptr;
        makecontext(&fiber.beginning, fiber_entry, 0);
    }
    of->members[rank].base = shared;
    for (of->started++; of->started < (int)of->members.size();) std::this_thread::yield();
    while (mine.alive)
        for (unsigned i = 0; i < threads; i++)
            if (!mine.fibers[i]->done) {
                mine.running = threadIdx.x = i;
                run_on(mine, *mine.fibers[i]);
            }
}
inline void run_grid(u32 grid, u32 threads, u32 cluster_size, const std::function<void()> &body) {
    for (u32 first = 0; first < grid; first += cluster_size) {
        Cluster together;
        together.threads = threads * cluster_size;
        together.members = std::vector<Member>(cluster_size);
        std::vector<std::thread> blocks;
        for (u32 i = 0; i < cluster_size; i++)
            blocks.emplace_back(run_block, first + i, i, grid, threads, &together, std::cref(body));
        for (auto &b : blocks) b.join();
    }
}
// As cuLaunchKernel: pointers to the arguments.
template <class... A, size_t... I>
void launch_with(void (*kernel)(A...), u32 grid, u32 threads, u32 cluster, void **at, std::index_sequence<I...>) {
    run_grid(grid, threads, cluster, [=] { kernel(*(A *)at[I]...); });
}
template <class... A> void launch_kernel(void (*kernel)(A...), u32 grid, u32 threads, u32 cluster, void **at) {
    launch_with(kernel, grid, threads, cluster, at, std::index_sequence_for<A...>());
}
