// PTX wrappers for the CUDA kernels of this folder, one function per instruction. tests/cuda_emulation.h emulates them
// on a CPU, so that tests run the same kernels without a GPU. `BRAIN` is 1 for bfloat16, 0 for float16; shared-memory
// addresses are 32-bit (`shared_address`).
#ifndef PTX_CUH
#define PTX_CUH

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
#define UNROLL _Pragma("unroll")
#define INLINE __device__ __forceinline__

// ---- conversions and arithmetic

INLINE float half_to_float(u32 half) { // float16 in the low 16 bits of a word
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)half));
    return f;
}
template <int BRAIN> INLINE float to_float(u32 half) {
    return BRAIN ? __uint_as_float(half << 16) : half_to_float(half);
}
template <int BRAIN> INLINE u16 to_half(float v) {
    u16 h;
    if (BRAIN) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
template <int BRAIN> INLINE u32 to_halves(float low, float high) {
    u32 h;
    if (BRAIN) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    return h;
}
template <int BRAIN> INLINE u32 multiply_add(u32 a, u32 b, u32 c) { // a b + c in both halves
    u32 d;
    if (BRAIN) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
template <int BRAIN> INLINE u32 multiply(u32 a, u32 b) { // in both halves
    return multiply_add<BRAIN>(a, b, 0x80008000); // adds -0: mul.bf16x2 needs compute capability 9.0
}

template <int BRAIN> INLINE u32 least(u32 a, u32 b) { // of both halves
    u32 v;
    if (BRAIN) asm("min.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    else asm("min.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
template <int BRAIN> INLINE u32 most(u32 a, u32 b) { // of both halves; NaN where one is
    u32 v;
    if (BRAIN) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
INLINE float most(float a, float b) { // NaN where one is
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
template <int BRAIN> INLINE u32 at_least(u32 a, u32 b) { // all bits of a half whose number in a is not below that in b
    u32 v;
    if (!BRAIN) {
        asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
        return v;
    }
#if __CUDA_ARCH__ >= 900
    asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#else
    v = to_float<1>(a & 0xFFFF) >= to_float<1>(b & 0xFFFF) ? 0xFFFF : 0;
    v |= to_float<1>(a >> 16) >= to_float<1>(b >> 16) ? 0xFFFF0000 : 0;
#endif
    return v;
}
template <int BRAIN> INLINE u32 half_above(float v) { // the least number of 16 bits that is not below v
    const u32 bits = __float_as_uint(v);
    if (BRAIN) return (bits >> 31 ? bits : bits + 0xFFFF) >> 16;
    u16 h;
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

INLINE float reciprocal(float v) { // within an ulp; 0 of what is infinite or has one that is not normal
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
INLINE u32 from_e4m3(u32 two) { // float16 of the E4M3 in the low two bytes, which are not negative
    u32 halves;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)two));
#else
    halves = multiply<0>((two & 0x7F) << 7 | (two & 0x7F00) << 15, 0x5C005C00); // 256: exponents begin 8 later
#endif
    return halves;
}

INLINE u32 kept(u32 v) { // in a register: not computed again where it is used
    asm volatile("" : "+r"(v));
    return v;
}

template <class T> INLINE const T *kept(const T *p) {
    asm volatile("" : "+l"(p));
    return p;
}

// ---- tensor core. Lane 4 g + t holds rows g, g + 8 of A and C and column g of B.

#define MMA(TYPE)                                                                                                      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32"                                                  \
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                        \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <int BRAIN> INLINE void mma(float c[4], const u32 a[4], u32 b0, u32 b1) { // C [16, 8] += A [16, 16] B [16, 8]
    if (BRAIN) MMA("bf16");
    else MMA("f16");
}
#undef MMA
INLINE void mma_int8(int c[4], u32 a0, u32 a2, u32 b0, u32 b1) { // C [8, 8] += A [8, 32] B [32, 8]; rows 8 to 15 are 0
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// C [16, 8] += bits that A [16, 256] and B [256, 8] have in common; a lane's words are of columns 32 t and 128 + 32 t
INLINE void count_common(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of A [16, 128] and B [128, 8]; a lane's word is of columns 32 t
INLINE void count_common(int c[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// 8 x 8 16-bit values: lane 4 g + t passes columns 2 t, 2 t + 1 of row g and receives rows 2 t, 2 t + 1 of column g.
INLINE u32 transpose(u32 pair) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// One warpgroup, four warps with 16 of the 64 rows each: D [64, N] += A [64, 16] B [16, N], N a multiple of 8 up to
// 160. Lanes hold A and D as for `mma`; d[n] holds columns 8 n to 8 n + 7. B is in shared memory as rows of 128 bytes, one
// per column of B, with the 128-byte swizzle: 16-byte piece p of a row is stored at p ^ row % 8. The row number comes from
// the address, so B is aligned to 1024 bytes. `b` is the descriptor `matrix(first row)` plus the offset of the 16
// elements in pieces. FIRST: D = A B, whatever D was.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define OF_8 "%0,%1,%2,%3"
#define SUMS_8 FOUR(0)
#define OF_16 OF_8 ",%4,%5,%6,%7"
#define SUMS_16 SUMS_8, FOUR(1)
#define OF_24 OF_16 ",%8,%9,%10,%11"
#define SUMS_24 SUMS_16, FOUR(2)
#define OF_32 OF_24 ",%12,%13,%14,%15"
#define SUMS_32 SUMS_24, FOUR(3)
#define OF_40 OF_32 ",%16,%17,%18,%19"
#define SUMS_40 SUMS_32, FOUR(4)
#define OF_48 OF_40 ",%20,%21,%22,%23"
#define SUMS_48 SUMS_40, FOUR(5)
#define OF_56 OF_48 ",%24,%25,%26,%27"
#define SUMS_56 SUMS_48, FOUR(6)
#define OF_64 OF_56 ",%28,%29,%30,%31"
#define SUMS_64 SUMS_56, FOUR(7)
#define OF_72 OF_64 ",%32,%33,%34,%35"
#define SUMS_72 SUMS_64, FOUR(8)
#define OF_80 OF_72 ",%36,%37,%38,%39"
#define SUMS_80 SUMS_72, FOUR(9)
#define OF_88 OF_80 ",%40,%41,%42,%43"
#define SUMS_88 SUMS_80, FOUR(10)
#define OF_96 OF_88 ",%44,%45,%46,%47"
#define SUMS_96 SUMS_88, FOUR(11)
#define OF_104 OF_96 ",%48,%49,%50,%51"
#define SUMS_104 SUMS_96, FOUR(12)
#define OF_112 OF_104 ",%52,%53,%54,%55"
#define SUMS_112 SUMS_104, FOUR(13)
#define OF_120 OF_112 ",%56,%57,%58,%59"
#define SUMS_120 SUMS_112, FOUR(14)
#define OF_128 OF_120 ",%60,%61,%62,%63"
#define SUMS_128 SUMS_120, FOUR(15)
#define OF_136 OF_128 ",%64,%65,%66,%67"
#define SUMS_136 SUMS_128, FOUR(16)
#define OF_144 OF_136 ",%68,%69,%70,%71"
#define SUMS_144 SUMS_136, FOUR(17)
#define OF_152 OF_144 ",%72,%73,%74,%75"
#define SUMS_152 SUMS_144, FOUR(18)
#define OF_160 OF_152 ",%76,%77,%78,%79"
#define SUMS_160 SUMS_152, FOUR(19)
#define PRODUCT(N, TYPE, ADD, A, B)                                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" OF_##N "}, {" A "}, " B ", "     \
                 ADD ", 1, 1, 0;"                                                                                       \
                 : SUMS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PRODUCTS(TYPE, ADD) \
    if constexpr (N == 8) PRODUCT(8, TYPE, ADD, "%4,%5,%6,%7", "%8"); \
    else if constexpr (N == 16) PRODUCT(16, TYPE, ADD, "%8,%9,%10,%11", "%12"); \
    else if constexpr (N == 24) PRODUCT(24, TYPE, ADD, "%12,%13,%14,%15", "%16"); \
    else if constexpr (N == 32) PRODUCT(32, TYPE, ADD, "%16,%17,%18,%19", "%20"); \
    else if constexpr (N == 40) PRODUCT(40, TYPE, ADD, "%20,%21,%22,%23", "%24"); \
    else if constexpr (N == 48) PRODUCT(48, TYPE, ADD, "%24,%25,%26,%27", "%28"); \
    else if constexpr (N == 56) PRODUCT(56, TYPE, ADD, "%28,%29,%30,%31", "%32"); \
    else if constexpr (N == 64) PRODUCT(64, TYPE, ADD, "%32,%33,%34,%35", "%36"); \
    else if constexpr (N == 72) PRODUCT(72, TYPE, ADD, "%36,%37,%38,%39", "%40"); \
    else if constexpr (N == 80) PRODUCT(80, TYPE, ADD, "%40,%41,%42,%43", "%44"); \
    else if constexpr (N == 88) PRODUCT(88, TYPE, ADD, "%44,%45,%46,%47", "%48"); \
    else if constexpr (N == 96) PRODUCT(96, TYPE, ADD, "%48,%49,%50,%51", "%52"); \
    else if constexpr (N == 104) PRODUCT(104, TYPE, ADD, "%52,%53,%54,%55", "%56"); \
    else if constexpr (N == 112) PRODUCT(112, TYPE, ADD, "%56,%57,%58,%59", "%60"); \
    else if constexpr (N == 120) PRODUCT(120, TYPE, ADD, "%60,%61,%62,%63", "%64"); \
    else if constexpr (N == 128) PRODUCT(128, TYPE, ADD, "%64,%65,%66,%67", "%68"); \
    else if constexpr (N == 136) PRODUCT(136, TYPE, ADD, "%68,%69,%70,%71", "%72"); \
    else if constexpr (N == 144) PRODUCT(144, TYPE, ADD, "%72,%73,%74,%75", "%76"); \
    else if constexpr (N == 152) PRODUCT(152, TYPE, ADD, "%76,%77,%78,%79", "%80"); \
    else PRODUCT(160, TYPE, ADD, "%80,%81,%82,%83", "%84");
// Swizzle of 128 bytes; 8 rows are 1024. Adding a piece to all 64 bits is one instruction; `matrix_piece`, which has three,
// needs fewer registers (volatile: it is not computed before it is needed).
INLINE u64 matrix(u32 p) { return 0x40000040ull << 32 | (p / 16 + (1 << 16)); }
INLINE u64 matrix_piece(u32 p, u32 piece) {
    u64 b;
    asm volatile("mov.b64 %0, {%1, 0x40000040};" : "=l"(b) : "r"(p / 16 + (1 << 16) + piece));
    return b;
}
template <int BRAIN, int N, bool FIRST = false> INLINE void wgmma(float (*d)[4], const u32 a[4], u64 b) {
    static_assert(N % 8 == 0 && N <= 160, "no such product");
    if constexpr (BRAIN && FIRST) { PRODUCTS("bf16", "0"); }
    else if constexpr (BRAIN) { PRODUCTS("bf16", "1"); }
    else if constexpr (FIRST) { PRODUCTS("f16", "0"); }
    else { PRODUCTS("f16", "1"); }
}
#undef PRODUCTS
#undef PRODUCT
#undef OF_160
#undef SUMS_160
#undef OF_152
#undef SUMS_152
#undef OF_144
#undef SUMS_144
#undef OF_136
#undef SUMS_136
#undef OF_128
#undef SUMS_128
#undef OF_120
#undef SUMS_120
#undef OF_112
#undef SUMS_112
#undef OF_104
#undef SUMS_104
#undef OF_96
#undef SUMS_96
#undef OF_88
#undef SUMS_88
#undef OF_80
#undef SUMS_80
#undef OF_72
#undef SUMS_72
#undef OF_64
#undef SUMS_64
#undef OF_56
#undef SUMS_56
#undef OF_48
#undef SUMS_48
#undef OF_40
#undef SUMS_40
#undef OF_32
#undef SUMS_32
#undef OF_24
#undef SUMS_24
#undef OF_16
#undef SUMS_16
#undef OF_8
#undef SUMS_8
#undef FOUR
// A warpgroup gives registers back, or takes what others gave: a multiple of 8 for each thread.
template <int COUNT> INLINE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> INLINE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
INLINE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); } // registers are ready
INLINE void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); } // commits a group
template <int PENDING> INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
INLINE float multiplied(float sum) { // of a group that has been waited for, of which the compiler does not know
    asm volatile("" : "+f"(sum)::"memory");
    return sum;
}
// Makes this thread's writes to shared memory visible to the tensor cores.
INLINE void show_matrix_unit() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// ---- memory: 16 bytes per access, aligned to 16, unless the name says otherwise

INLINE u64 evict_first() { // L2 policy for data that is read once
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
INLINE u64 evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
INLINE uint4 load_past_l1(const void *p, u64 policy) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
    return v;
}
INLINE uint4 load_early(const void *p) { // volatile: the compiler does not move it after other memory accesses
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
INLINE void bring_to_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
template <int BYTES> INLINE u32 load_early_if(const void *p, bool when) { // 2 or 4 bytes; 0 unless `when`
    u32 v = 0;
#define LOAD(TYPE)                                                                                                     \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global." TYPE " %0, [%1];}"                               \
                 : "+r"(v) : "l"(p), "r"((u32)when))
    if (BYTES == 4) LOAD("u32");
    else LOAD("u16");
#undef LOAD
    return v;
}

INLINE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
INLINE uint4 load16(u32 p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
    return v;
}
INLINE void load16_if(uint4 &v, u32 p, bool when) { // v is unchanged unless `when`
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "r"(p), "r"((u32)when) : "memory");
}
INLINE uint2 load8(u32 p) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
    return v;
}

INLINE u32 load_byte(u32 p) { // of shared memory
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
    return v;
}
INLINE float load4(u32 p) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(p) : "memory");
    return v;
}
INLINE u32 load_word(u32 p) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
    return v;
}
INLINE void load_few(u32 (&v)[2], u32 p) { *(uint2 *)v = load8(p); }
INLINE void load_few(u32 (&v)[1], u32 p) { v[0] = load_word(p); }

// cp.async: copies of 16 bytes into shared memory, or of zeros if `zero`; no operation unless `when`.
INLINE void copy(u32 to, const void *from, bool when, bool zero) { // through L1
    asm volatile("{.reg .pred p, z; setp.ne.u32 p, %2, 0; setp.ne.u32 z, %3, 0;"
                 "@p cp.async.ca.shared.global [%0], [%1], 16, z;}"
                 ::"r"(to), "l"(from), "r"((u32)when), "r"((u32)zero) : "memory");
}
INLINE void copy_once(u32 to, const void *from, u64 policy, bool when, bool zero) { // bypasses L1
    asm volatile("{.reg .pred p, z; setp.ne.u32 p, %3, 0; setp.ne.u32 z, %4, 0;"
                 "@p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, z, %2;}"
                 ::"r"(to), "l"(from), "l"(policy), "r"((u32)when), "r"((u32)zero) : "memory");
}
INLINE void copy_past_l1(u32 to, const void *from, bool zero) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(zero ? 0 : 16) : "memory");
}
template <int BYTES> INLINE void copy_few(u32 to, const void *from, bool when, bool zero) { // 4 or 8 bytes
    asm volatile("{.reg .pred p, z; setp.ne.u32 p, %3, 0; setp.ne.u32 z, %4, 0;"
                 "@p cp.async.ca.shared.global [%0], [%1], %2, z;}"
                 ::"r"(to), "l"(from), "n"(BYTES), "r"((u32)when), "r"((u32)zero) : "memory");
}
INLINE void store_matrices(u32 p, uint4 v) { // four of 8 x 8 16-bit values; lane 8 i + r: address of row r of matrix i
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
INLINE void store8(u32 p, uint2 v) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(p), "r"(v.x), "r"(v.y) : "memory"); }
INLINE void store16(u32 p, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
INLINE void store16(u32 p, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
INLINE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); } // commits a group
template <int PENDING> INLINE void wait_for_copies() { // all groups of this thread but the last PENDING
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// mbarriers: 8 bytes of shared memory each. A phase completes after `count` arrivals; phases are numbered from 0.
INLINE void signal_init(u32 signal, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(signal), "r"(count) : "memory");
}
INLINE void signal_arrive(u32 signal) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(signal) : "memory"); }
INLINE void signal_wait(u32 signal, u32 turn) { // until a phase completes, the current or the previous one
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}"
                 ::"r"(signal), "r"(turn & 1) : "memory");
}
#if __CUDA_ARCH__ >= 900
// Shows mbarriers that this thread has initialized to bulk copies.
INLINE void show_signals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void signal_expect(u32 signal, u32 bytes) { // arrives; the phase also waits for bytes of bulk copies
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(signal), "r"(bytes) : "memory");
}
// Copies bytes, a multiple of 16, that `signal` waits for.
INLINE void copy_bulk(u32 to, const void *from, u32 bytes, u32 signal, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(signal), "l"(policy) : "memory");
}
#endif
#if __CUDA_ARCH__ >= 900
struct alignas(64) TensorMap { u64 words[16]; };
// Copies a box of a matrix, 64 columns from `column` on of rows from `row` on, in the layout of `wgmma`; to every thread
// block of the cluster whose bit is in `blocks`, at the same place, each with its own `signal`. Zeros outside.
INLINE void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 signal) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(signal) : "memory");
}
INLINE void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 signal, u32 blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(signal), "h"((u16)blocks) : "memory");
}
INLINE void signal_arrive(u32 signal, u32 rank) { // of a thread block of the cluster
    asm volatile("{.reg .u32 s; mapa.shared::cluster.u32 s, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [s];}"
                 ::"r"(signal), "r"(rank) : "memory");
}
#endif
INLINE void barrier(u32 which, u32 threads) { // named barrier 1 to 15; __syncthreads uses 0
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

// ---- memory that several devices of a host write and read: 8 bytes at a time, which are never torn

INLINE void store_system(u64 *p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
INLINE u64 load_system(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// ---- a launch beside the one before it; compute capability 9.0 and later

#if __CUDA_ARCH__ >= 900
INLINE void begin_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); } // once all blocks say so
INLINE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); } // to end
#endif

// ---- thread block clusters and distributed shared memory; compute capability 9.0 and later

#if __CUDA_ARCH__ >= 900
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); } // no memory ordering
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
INLINE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// Initializes an mbarrier of a receiving thread block, which completes once `bytes` have been sent to it.
INLINE void expect_bytes(u32 arrived, u32 bytes) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 "fence.mbarrier_init.release.cluster;" ::"r"(arrived), "r"(bytes) : "memory");
}
INLINE void send(u32 to, float v, u32 arrived, u32 rank) { // addresses as in this thread block
    asm volatile("{.reg .u32 t, b; mapa.shared::cluster.u32 t, %0, %3; mapa.shared::cluster.u32 b, %2, %3;"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [t], %1, [b];}"
                 ::"r"(to), "r"(__float_as_uint(v)), "r"(arrived), "r"(rank) : "memory");
}
INLINE void send(u32 to, uint2 v, u32 arrived, u32 rank) {
    asm volatile("{.reg .u32 t, b; mapa.shared::cluster.u32 t, %0, %4; mapa.shared::cluster.u32 b, %3, %4;"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [t], {%1, %2}, [b];}"
                 ::"r"(to), "r"(v.x), "r"(v.y), "r"(arrived), "r"(rank) : "memory");
}
INLINE void send(u32 to, float4 v, u32 arrived, u32 rank) {
    asm volatile("{.reg .u32 t, b; mapa.shared::cluster.u32 t, %0, %6; mapa.shared::cluster.u32 b, %5, %6;"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [t], {%1, %2, %3, %4}, [b];}"
                 ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(arrived), "r"(rank) : "memory");
}
INLINE void wait_for_bytes(u32 arrived) {
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0;"
                 "@!p bra again;}" ::"r"(arrived) : "memory");
}
#endif
#endif
