// Runs a CUDA kernel on a CPU, to test its source where there is no GPU: the .cu file is compiled as C++ with this
// header in front (g++ -include), which takes the place of kernels/ptx.cuh. What a kernel calls is defined in
// cuda_emulation.cpp, compiled once for all kernels; here is what reads memory of the kernel's own.
#pragma once
#define PTX_CUH

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

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
static thread_local __align__(128) char shared[SHARED_BYTES]; // what `extern __shared__` names
extern __thread Index threadIdx, blockIdx, blockDim, gridDim;

inline float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 as_bits(float v) { u32 u; memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(u32 v) { return as_float(v); }
inline u32 __float_as_uint(float v) { return as_bits(v); }

// Every read of global memory is checked against the tensors that the kernel was given.
void check_read(const void *p, int bytes);
template <class T> T __ldg(const T *p) { check_read(p, sizeof(T)); return *p; }
template <class T> T __ldcg(const T *p) { return __ldg(p); }

void __syncwarp();
void __syncthreads();
void barrier(u32 which, u32 threads);
float __shfl_xor_sync(unsigned, float v, int mask);
u32 __shfl_xor_sync(unsigned, u32 v, int mask);
float __shfl_sync(unsigned, float v, int from, int width);
u32 __shfl_sync(unsigned, u32 v, int from, int width);
u32 __reduce_max_sync(unsigned, u32 v);
u32 __reduce_add_sync(unsigned, u32 v);
u32 __ballot_sync(unsigned, bool v);

inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float reciprocal(float v) { return std::nextafter(1 / v, 0); } // as far off as the instruction may be
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
float __fadd_rd(float a, float b);
float __fmaf_ru(float a, float b, float c);
inline int __popc(u32 v) { return __builtin_popcount(v); }
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);
inline int atomicAdd(int *to, int v) { int old = *to; *to += v; return old; } // fibers of one thread
inline float atomicAdd(float *to, float v) { float old = *to; *to += v; return old; }
inline void __threadfence() {} // blocks of a grid run one after the other

// ---- kernels/ptx.cuh: conversions and arithmetic

float half_to_float(u32 half);
template <int BRAIN> float to_float(u32 v) { return BRAIN ? as_float(v << 16) : half_to_float(v & 0xFFFF); }
template <int BRAIN> u16 to_half(double v);
template <int BRAIN> u32 to_halves(double low, double high) {
    return to_half<BRAIN>(low) | (u32)to_half<BRAIN>(high) << 16;
}
template <int BRAIN> u32 multiply_add(u32 a, u32 b, u32 c);
template <int BRAIN> u32 multiply(u32 a, u32 b) { return multiply_add<BRAIN>(a, b, 0x80008000); }
float most(float a, float b);
template <int BRAIN> u32 least(u32 a, u32 b);
template <int BRAIN> u32 most(u32 a, u32 b);
template <int BRAIN> u32 at_least(u32 a, u32 b);
template <int BRAIN> u32 half_above(float v);
u32 from_e4m3(u32 two);
inline u32 kept(u32 v) { return v; }
template <class T> const T *kept(const T *p) { return p; }

// ---- shared and global memory

inline unsigned shared_address(const void *p) { return unsigned((const char *)p - shared); }
template <class T> T &at_shared(unsigned p) { return *(T *)(shared + (int)p); }
inline u32 load_byte(unsigned p) { return at_shared<unsigned char>(p); }
inline u32 load_word(unsigned p) { return at_shared<u32>(p); }
inline float load4(unsigned p) { return at_shared<float>(p); }
inline uint2 load8(unsigned p) { return at_shared<uint2>(p); }
inline uint4 load16(unsigned p) { return at_shared<uint4>(p); }
inline void load16_if(uint4 &v, unsigned p, bool when) { if (when) v = load16(p); }
inline void load_few(u32 (&v)[2], unsigned p) { *(uint2 *)v = at_shared<uint2>(p); }
inline void load_few(u32 (&v)[1], unsigned p) { v[0] = at_shared<u32>(p); }
inline void store8(unsigned p, uint2 v) { at_shared<uint2>(p) = v; }
inline void store16(unsigned p, uint4 v) { at_shared<uint4>(p) = v; }
inline void store16(unsigned p, float4 v) { at_shared<float4>(p) = v; }
void store_matrices(unsigned p, uint4 v);

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

// ---- copies to shared memory, which land as late as they may

void copy_bytes(unsigned to, const void *from, bool zero, int bytes);
inline void copy(unsigned to, const void *from, bool when, bool zero) { if (when) copy_bytes(to, from, zero, 16); }
inline void copy_once(unsigned to, const void *from, u64, bool when, bool zero) { copy(to, from, when, zero); }
template <int BYTES> void copy_few(unsigned to, const void *from, bool when, bool zero) {
    if (when) copy_bytes(to, from, zero, BYTES);
}
inline void copy_past_l1(unsigned to, const void *from, bool zero) { copy(to, from, true, zero); }
void end_of_copies();
void wait_until_copied(int pending); // all groups but that many
template <int PENDING> void wait_for_copies() { wait_until_copied(PENDING); }

void signal_init(u32 p, u32 count);
void signal_arrive(u32 p);
void signal_arrive(u32 p, u32 rank);
void signal_expect(u32 p, u32 bytes);
void signal_wait(u32 p, u32 turn);
inline void show_signals() {}
void copy_bulk(u32 to, const void *from, u32 bytes, u32 p, u64);
struct alignas(64) TensorMap { u64 address, rows, columns, box, rest[12]; }; // in place of what the driver encodes
void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 p, u32 blocks);
void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 p);

// ---- matrix products

template <int BRAIN> void mma(float c[4], const unsigned a[4], unsigned b0, unsigned b1);
void mma_int8(int c[4], u32 a0, u32 a2, u32 b0, u32 b1);
void count_common(int c[4], const u32 a[4], u32 b0, u32 b1);
void count_common(int c[4], u32 a0, u32 a1, u32 b); // the other half of A and B is 0
u32 transpose(u32 pair);
inline u64 matrix(u32 p) { return p / 16; }
inline u64 matrix_piece(u32 p, u32 piece) { return matrix(p) + piece; }
void multiply_later(bool brain, int columns, bool first, float (*d)[4], const unsigned a[4], unsigned b);
template <int BRAIN, int N, bool FIRST = false> void wgmma(float (*d)[4], const unsigned a[4], u64 b) {
    multiply_later(BRAIN, N, FIRST, d, a, b);
}
inline void wgmma_begin() {}
inline float multiplied(float sum) { return sum; }
void wgmma_end();
void wait_until_multiplied(int pending); // all groups but that many
template <int PENDING> void wgmma_wait() { wait_until_multiplied(PENDING); }
inline void show_matrix_unit() {}

// ---- launches and clusters

inline void store_system(u64 *p, u64 v) { check_read(p, 8), __atomic_store_n(p, v, __ATOMIC_RELAXED); }
u64 load_system(const u64 *p);
inline void begin_next() {}
inline void wait_for_launch_before() {}
template <int> void fewer_registers() {}
template <int> void more_registers() {}
void cluster_arrive();
void cluster_wait();
inline void cluster_barrier() { cluster_arrive(), cluster_wait(); }
void expect_bytes(u32 counter, u32 bytes);
void send_bytes(u32 to, const void *from, int bytes, u32 counter, u32 rank);
template <class T> void send(u32 to, T value, u32 counter, u32 rank) {
    send_bytes(to, &value, sizeof value, counter, rank);
}
void wait_for_bytes(u32 counter);

struct Launch {
    u32 grid, threads, cluster; // the last one in thread blocks
    void **at;                  // pointers to the arguments, as for cuLaunchKernel
    void (*kernel)(void **at);
    char *(*shared)(); // memory of the thread that asks
    u32 shared_bytes;  // of it that a block asks for
    bool boxes_land_early; // at the next wait of a block for any signal, not at that for theirs
};
// How often the launch reads outside the `count` tensors that it is given and writes shared memory that no block asks
// for; or minus how many pieces of bulk copies blocks leave in flight; or NEVER_ENDS.
constexpr int NEVER_ENDS = -(1 << 30); // every thread of a cluster waits
int run(const Launch &launch, u32 count, void **starts, const u64 *sizes);
inline char *shared_here() { return shared; }
template <class... A, size_t... I> void call(void (*kernel)(A...), void **at, std::index_sequence<I...>) {
    kernel(*(A *)at[I]...);
}
template <class... A> void call(void (*kernel)(A...), void **at) {
    call(kernel, at, std::index_sequence_for<A...>());
}
template <auto KERNEL> void call_with(void **at) { call(KERNEL, at); }
