// y[m, n] = s_x[m] * s_w[n] * sum_k x_q[m, k] w_q[n, k], x quantized to int8 in the same launch. See w8a8_gemv.py.
//
// Compiled once per configuration; the launcher defines:
//   BF16     1 for bf16 activations, 0 for fp16        TOKENS   1..8, rows of x
//   WARPS    warps of a program, which split K         TILES    8-row tiles that a program works on at once
//   DEPTH    even: 16-byte loads in flight per tile    RESIDENT programs that share a multiprocessor
//   VECTORS  8-column pieces of a token per thread     ALIGNED  1 when every row begins at a multiple of 16 bytes
//   CLUSTER  1, 2, 4 or 8 programs that share the work of quantizing: each takes its tokens and hands the codes to all
//            (more than 1 needs compute capability 9.0)
//
// Weights are the right operand of mma.m16n8k32 (8 output channels), tokens the left one (8 of its 16 rows are used). A
// lane owns 16 consecutive bytes of one weight row: two steps of the mma, if the 16 columns are dealt out in the same
// order on both sides. So neither weights nor activations need any rearrangement.

typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 8 * TILES;
constexpr int ROUND = 64 * DEPTH * WARPS;  // columns
__device__ constexpr int offset(int d) { return d / 2 * 128 * WARPS + d % 2 * 64; }

// Sixteen weights; read once, so they are the first to leave L1 and L2.
__device__ __forceinline__ uint4 load_weights(const signed char* w, int count, u64 evict_first) {
    uint4 v = {0, 0, 0, 0};
#if ALIGNED
    if (count > 0)
        asm volatile("ld.global.L1::evict_first.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(w), "l"(evict_first));
#else
    signed char* bytes = reinterpret_cast<signed char*>(&v);
    for (int i = 0; i < 16; ++i) bytes[i] = i < count ? w[i] : 0;
#endif
    return v;
}

// Eight activations, zero beyond the token's end.
__device__ __forceinline__ uint4 load_activations(const unsigned short* x, int count) {
    uint4 v = {0, 0, 0, 0};
#if ALIGNED
    if (count > 0)  // volatile: the compiler keeps it ahead of the weights
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x));
#else
    unsigned short* halves = reinterpret_cast<unsigned short*>(&v);
    for (int i = 0; i < 8; ++i) halves[i] = i < count ? x[i] : 0;
#endif
    return v;
}

__device__ __forceinline__ float to_float(u32 half) {
#if BF16
    return __uint_as_float(half << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((unsigned short)half));
    return f;
#endif
}

__device__ __forceinline__ unsigned short to_half(float f) {
    unsigned short half;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(f));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(f));
#endif
    return half;
}

// Two activations to two codes in bytes 0 and 1. Adding 1.5 * 2^23 rounds half to even and leaves the code in the low
// byte.
__device__ __forceinline__ u32 quantize(u32 pair, float inverse) {
    u32 low = __float_as_uint(__fmaf_rn(to_float(pair & 0xFFFF), inverse, 12582912.0f));
    u32 high = __float_as_uint(__fmaf_rn(to_float(pair >> 16), inverse, 12582912.0f));
    return __byte_perm(low, high, 0x0040);
}

__device__ __forceinline__ void mma(int (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// Bytes between two tokens in shared memory: 64 past a multiple of 128, so that 16-byte reads of two tokens never meet
// in a bank.
__device__ __forceinline__ int token_stride(int K) { return (K + 127) / 128 * 128 + 64; }

// Hands 8 bytes to every program of the cluster, at the same place in its shared memory. `arrived` counts bytes there.
__device__ __forceinline__ void hand_out(void* to, uint2 v, u64* arrived) {
#if CLUSTER > 1
    const u32 here = (u32)__cvta_generic_to_shared(to), count = (u32)__cvta_generic_to_shared(arrived);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank)
        asm volatile("{.reg .u32 to, count; mapa.shared::cluster.u32 to, %0, %2;"
                     "mapa.shared::cluster.u32 count, %1, %2;"
                     "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [to], {%3, %4}, [count];}"
                     :: "r"(here), "r"(count), "r"(rank), "r"(v.x), "r"(v.y) : "memory");
#else
    *reinterpret_cast<uint2*>(to) = v;
#endif
}

// Expects `bytes` from the cluster; `cluster_runs` returns once every program of it does the same.
__device__ __forceinline__ void expect(u64* arrived, int bytes) {
#if CLUSTER > 1
    if (threadIdx.x == 0) {
        const u32 count = (u32)__cvta_generic_to_shared(arrived);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(count) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(count), "r"(bytes) : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_runs() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_bytes(u64* arrived) {
#if CLUSTER > 1
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;"
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"((u32)__cvta_generic_to_shared(arrived)) : "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
w8a8_gemv(const unsigned short* __restrict__ x, const signed char* __restrict__ w, const float* __restrict__ s_w,
          unsigned short* __restrict__ y, int N, int K) {
    extern __shared__ __align__(16) unsigned char codes[];  // [TOKENS][token_stride(K)]
    __shared__ uint2 s_x[TOKENS];                           // a float each
    __shared__ int sums[2][TOKENS][ROWS];                   // of two row groups in turn
    __shared__ u32 maxima[WARPS];
    __shared__ u64 arrived;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, part = lane % 4;
    const int stride = token_stride(K), groups = (N + ROWS - 1) / ROWS;
    const int first_token = blockIdx.x % CLUSTER;
    u64 evict_first;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
    expect(&arrived, TOKENS * ((K + 7) / 8 * 8 + 8));

    // x goes first: behind the weights' misses it would wait for them.
    uint4 token[VECTORS];
    auto load_token = [&](int m) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int k = (i * THREADS + threadIdx.x) * 8;
            token[i] = load_activations(x + (long long)m * K + k, K - k);
        }
    };
    if (first_token < TOKENS) load_token(first_token);
    __syncwarp();  // keeps the compiler from putting the weights first

    // A lane's loads of a round lie at offset(0) ... offset(DEPTH - 1); two in turn are a cache line of its row.
    uint4 ring[DEPTH][TILES];
    const signed char* rows[TILES];
    const int lane_k = warp * 128 + 16 * part;
    int load_group = blockIdx.x, left = K - lane_k;  // columns from the round's first on, none after the last group
    auto aim = [&] {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            rows[tile] = w + (long long)min(load_group * ROWS + tile * 8 + row, N - 1) * K + lane_k;
    };
    auto load = [&](int d) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            ring[d][tile] = load_weights(rows[tile] + offset(d), left - offset(d), evict_first);
    };
    auto next_round = [&] {
        left -= ROUND;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) rows[tile] += ROUND;
        if (left + lane_k <= 0) {
            load_group += gridDim.x;
            left = load_group < groups ? K - lane_k : 0;
            aim();
        }
    };
    aim();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) load(d);
    next_round();

    // The thread that finishes (token, row) of a group holds that row's scale ahead of time.
    const int my_token = threadIdx.x / ROWS, my_row = threadIdx.x % ROWS;
    const bool finisher = my_token < TOKENS;
    float scale = s_w[min((int)blockIdx.x * ROWS + my_row, N - 1)];
    for (int i = threadIdx.x; i < 2 * TOKENS * ROWS; i += THREADS) (&sums[0][0][0])[i] = 0;

    cluster_runs();
#pragma unroll 1
    for (int m = first_token; m < TOKENS; m += CLUSTER) {
        u32 largest = 0;  // without its sign, a half's size is the order of its bits
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(token[i].x & 0x7FFF7FFF, token[i].y & 0x7FFF7FFF),
                                                 __vmaxu2(token[i].z & 0x7FFF7FFF, token[i].w & 0x7FFF7FFF)));
        largest = __reduce_max_sync(~0u, max(largest & 0xFFFF, largest >> 16));
        if (lane == 0) maxima[warp] = largest;
        __syncthreads();
        const float absmax = to_float(__reduce_max_sync(~0u, lane < WARPS ? maxima[lane] : 0));
        const float inverse = absmax > 1e-30f ? __fdiv_rn(127.0f, absmax) : 0;
        if (threadIdx.x == 0) hand_out(&s_x[m], {__float_as_uint(__fdiv_rn(absmax, 127.0f)), 0}, &arrived);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int k = (i * THREADS + threadIdx.x) * 8;
            const uint2 q = {__byte_perm(quantize(token[i].x, inverse), quantize(token[i].y, inverse), 0x5410),
                             __byte_perm(quantize(token[i].z, inverse), quantize(token[i].w, inverse), 0x5410)};
            if (k < K) hand_out(codes + m * stride + k, q, &arrived);
        }
        if (m + CLUSTER < TOKENS) {
            load_token(m + CLUSTER);
            __syncthreads();  // everybody has read the maxima
        }
    }
    __syncthreads();
    wait_for_bytes(&arrived);

    int acc[TILES][4] = {}, buffer = 0;
#pragma unroll 1
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
#pragma unroll 1
        for (int k = warp * 128; k - warp * 128 < K; k += ROUND) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (k + offset(d) < K) {
                    uint4 a = {0, 0, 0, 0};
                    if (row < TOKENS)
                        a = *reinterpret_cast<const uint4*>(codes + row * stride + k + offset(d) + 16 * part);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        mma(acc[tile], a.x, a.y, ring[d][tile].x, ring[d][tile].y);
                        mma(acc[tile], a.z, a.w, ring[d][tile].z, ring[d][tile].w);
                    }
                }
                load(d);
                __syncwarp();  // or the compiler would put off the loads of a whole round
            }
            next_round();
        }
        // The warps' sums meet: integers, so their order does not matter.
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (row < TOKENS) {
                atomicAdd(&sums[buffer][row][tile * 8 + 2 * part], acc[tile][0]);
                atomicAdd(&sums[buffer][row][tile * 8 + 2 * part + 1], acc[tile][1]);
            }
            acc[tile][0] = acc[tile][1] = acc[tile][2] = acc[tile][3] = 0;
        }
        __syncthreads();
        if (finisher) {
            const int n = group * ROWS + my_row;
            const float value = (float)sums[buffer][my_token][my_row] * __uint_as_float(s_x[my_token].x) * scale;
            sums[buffer][my_token][my_row] = 0;  // used again after the next group's barrier
            if (n < N) y[(long long)my_token * N + n] = to_half(value);
            scale = s_w[min((group + (int)gridDim.x) * ROWS + my_row, N - 1)];
        }
        buffer ^= 1;
    }
}
