// Vectors of the widest kind the target has, in the compiler's own vector types: + - * ? : work as
// on numbers. Only what the language cannot say (half precision conversion) is spelled in
// intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

namespace flashmoe::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

template <class T, int kCount>
struct VectorOf {
  typedef T type __attribute__((vector_size(kCount * sizeof(T))));
};
template <class A>
using Vec = typename VectorOf<A, kLanes<A>>::type;

// The integer as wide as an accumulator.
template <class A>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <class A>
using Int = typename IntOf<A>::type;

template <class V, class T>
inline V load(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
inline void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}
template <class A>
inline Vec<A> splat(A a) {
  Vec<A> v;
  for (int i = 0; i < kLanes<A>; ++i) v[i] = a;  // not 0 + a, which loses the sign of -0
  return v;
}
template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// sum + b * a[kLane] as one instruction, which GCC does not find by itself.
#if defined(__ARM_NEON)
template <int kLane>
inline Vec<float> add_product(Vec<float> sum, Vec<float> b, Vec<float> a) {
  return vfmaq_laneq_f32(sum, b, a, kLane);
}
template <int kLane>
inline Vec<double> add_product(Vec<double> sum, Vec<double> b, Vec<double> a) {
  return vfmaq_laneq_f64(sum, b, a, kLane);
}
#endif

// The transpose of a square of vectors: a perfect shuffle of its rows, as often as it halves them.
template <class V, size_t... kLane>
inline void interleave(V a, V b, V* low, V* high, std::index_sequence<kLane...>) {
  constexpr int n = sizeof...(kLane);
  *low = __builtin_shufflevector(a, b, (kLane % 2 * n + kLane / 2)...);
  *high = __builtin_shufflevector(a, b, (kLane % 2 * n + n / 2 + kLane / 2)...);
}
template <class A>
inline void transpose(Vec<A> (&rows)[kLanes<A>]) {
  constexpr int n = kLanes<A>;
  for (int step = 1; step < n; step *= 2) {
    Vec<A> next[n];
    for (int i = 0; i < n / 2; ++i) {
      interleave(rows[i], rows[i + n / 2], &next[2 * i], &next[2 * i + 1],
                 std::make_index_sequence<n>());
    }
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
}

constexpr double kLog2e = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;
template <class A>
constexpr A kInf = __builtin_inff();

// 2^x for x <= 127. Below 2^-126 it is 0; NaN stays NaN. Relative error 2e-9 before rounding: a
// minimax polynomial of degree 6 on [-1/2, 1/2]; degree 5 would show in fp32 (8e-8).
inline Vec<float> exp2(Vec<float> x) {
  const Vec<float> magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  x = splat(-127.f) > x ? splat(-127.f) : x;   // this way round a NaN is kept
  const Vec<float> t = x + magic;
  const Vec<float> f = x - (t - magic);
  Vec<float> p = splat(1.53458078e-4f);
  p = p * f + 1.33999316e-3f;
  p = p * f + 9.61848898e-3f;
  p = p * f + 5.55032878e-2f;
  p = p * f + 0.240226469f;
  p = p * f + 0.693147206f;
  p = p * f + 1.f;
  // The low bits of t are the integer part: in the exponent's place, with its bias, they are a
  // power of two. At -127 that is the bit pattern of 0.
  const auto power = (bits_as<Vec<int32_t>>(t) << 23) + 0x3f800000;
  return p * bits_as<Vec<float>>(power);
}
inline Vec<double> exp2(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_exp2(x[i]);
  return x;
}

// tanh(x) and its derivative. With u = 2 / (e^2|x| + 1), tanh|x| = 1 - u and the derivative is u (2
// - u), which keeps its precision where tanh has come so close to 1 that 1 - tanh^2 has none. Near
// 0 an odd polynomial, so that small scores keep theirs.
inline Vec<float> tanh(Vec<float> x, Vec<float>* slope) {
  const Vec<float> z = x * x;
  Vec<float> p = splat(-5.71703257e-3f);
  p = p * z + 2.06505756e-2f;
  p = p * z - 5.37434943e-2f;
  p = p * z + 0.133314912f;
  p = p * z - 0.333332839f;
  const Vec<float> small = x + x * z * p;
  const Vec<float> size = x < 0.f ? -x : x;
  const Vec<float> capped = size > 40.f ? splat(40.f) : size;  // e^80 is near the largest float
  const Vec<float> u = 2.f / (exp2(capped * static_cast<float>(2 * kLog2e)) + 1.f);
  const Vec<float> large = x < 0.f ? u - 1.f : 1.f - u;
  const Vec<int32_t> near = z < 0.390625f;  // |x| < 0.625
  *slope = near ? 1.f - small * small : u * (2.f - u);
  return near ? small : large;
}
inline Vec<double> tanh(Vec<double> x, Vec<double>* slope) {
  for (int i = 0; i < kLanes<double>; ++i) {
    const double u = 2 / (__builtin_exp(2 * __builtin_fabs(x[i])) + 1);
    (*slope)[i] = u * (2 - u);
    x[i] = __builtin_tanh(x[i]);
  }
  return x;
}

// bfloat16 is the upper half of a float. Rounds to nearest even; NaN stays NaN.
inline float from_bf16(uint16_t h) { return bits_as<float>(static_cast<uint32_t>(h) << 16); }
inline uint16_t to_bf16(float f) {
  const uint32_t u = bits_as<uint32_t>(f);
  if (f != f) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if defined(__ARM_NEON)
inline float from_fp16(uint16_t h) { return bits_as<__fp16>(h); }
inline uint16_t to_fp16(float f) { return bits_as<uint16_t>(static_cast<__fp16>(f)); }
#elif defined(__F16C__)
inline float from_fp16(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t to_fp16(float f) { return _cvtss_sh(f, 0); }
#else
inline float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7fff;
  // 2^-24 per unit below the smallest normal; infinity and NaN keep their payload.
  if (rest < 0x400) return bits_as<float>(bits_as<uint32_t>(rest * 0x1p-24f) | sign);
  if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  return bits_as<float>(sign | ((rest << 13) + (112u << 23)));
}
inline uint16_t to_fp16(float f) {
  const uint32_t u = bits_as<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  const uint32_t rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00;   // NaN
  if (rest >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  if (rest < 0x38800000) {                       // subnormal: let the adder round at 2^-24
    return sign |
           static_cast<uint16_t>(bits_as<uint32_t>(bits_as<float>(rest) + 0.5f) - 0x3f000000);
  }
  return sign | static_cast<uint16_t>((rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13);
}
#endif

// A vector's worth of elements, widened to float and back.
using HalfVec = VectorOf<uint16_t, kLanes<float>>::type;

inline Vec<float> widen_bf16(const uint16_t* p) {
  const auto wide = __builtin_convertvector(load<HalfVec>(p), Vec<uint32_t>);
  return bits_as<Vec<float>>(wide << 16);
}
inline void narrow_bf16(uint16_t* p, Vec<float> v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  store(p, vcvt_bf16_f32(v));
#else
  const auto u = bits_as<Vec<uint32_t>>(v);
  const auto rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const auto nan = (u >> 16) | 0x40;
  store(p, __builtin_convertvector(v == v ? rounded : nan, HalfVec));
#endif
}

inline Vec<float> widen_fp16(HalfVec h) {
#if defined(__ARM_NEON)
  return vcvt_f32_f16(bits_as<float16x4_t>(h));
#elif defined(__AVX512F__)
  return _mm512_cvtph_ps(bits_as<__m256i>(h));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(bits_as<__m128i>(h));
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = from_fp16(h[i]);
  return v;
#endif
}
inline Vec<float> widen_fp16(const uint16_t* p) { return widen_fp16(load<HalfVec>(p)); }
inline void narrow_fp16(uint16_t* p, Vec<float> v) {
#if defined(__ARM_NEON)
  store(p, vcvt_f16_f32(v));
#elif defined(__AVX512F__)
  store(p, _mm512_cvtps_ph(v, 0));
#elif defined(__F16C__)
  store(p, _mm256_cvtps_ph(v, 0));
#else
  for (int i = 0; i < kLanes<float>; ++i) p[i] = to_fp16(v[i]);
#endif
}

// float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all bits set is
// NaN. Every number is one of fp16 and of bf16, so widening is exact. Narrowing rounds to nearest
// even and holds within +-448; NaN stays NaN.
constexpr int kSmallestNormalE4m3 = 8;  // 2^-6; below it units of 2^-9
constexpr int kNanE4m3 = 0x7f;

inline float from_e4m3(uint8_t b) {
  const uint32_t magnitude = b & 0x7f, sign = static_cast<uint32_t>(b & 0x80) << 24;
  uint32_t bits = (magnitude << 20) + (120u << 23);
  if (magnitude < kSmallestNormalE4m3) bits = bits_as<uint32_t>(magnitude * 0x1p-9f);
  if (magnitude == kNanE4m3) bits = 0x7fc00000;
  return bits_as<float>(bits | sign);
}

template <class A>
inline uint8_t to_e4m3(A x) {
  // A's mantissa has this many bits more than three. Adding a number whose last place is 2^-9 lets
  // the adder round what is below the smallest normal.
  constexpr int kRest = (sizeof(A) == sizeof(float) ? 23 : 52) - 3;
  constexpr A kAdd = sizeof(A) == sizeof(float) ? A(0x1p14) : A(0x1p43);
  using U = std::conditional_t<sizeof(A) == sizeof(float), uint32_t, uint64_t>;
  const uint8_t sign = __builtin_signbit(x) ? 0x80 : 0;
  if (x != x) return sign | kNanE4m3;
  A size = x < 0 ? -x : x;
  size = size > 448 ? 448 : size;
  if (size < A(0x1p-6)) {
    return static_cast<uint8_t>(sign | (bits_as<U>(size + kAdd) - bits_as<U>(kAdd)));
  }
  const U u = bits_as<U>(size), bias = sizeof(A) == sizeof(float) ? 120 : 1016;
  const U even = u >> kRest & 1;
  return static_cast<uint8_t>(sign |
                              (((u + (U(1) << (kRest - 1)) - 1 + even) >> kRest) - bias * 8));
}

// Two vectors of floats from as many bytes. As fp16 with the same bits of exponent a number is 2^-8
// of itself: one shift brings the bits to their place, the sign of which is then in two.
inline void widen_e4m3(const uint8_t* p, Vec<float>* low, Vec<float>* high) {
  constexpr int n = 2 * kLanes<float>;
  using Halves = VectorOf<uint16_t, n>::type;
  using Signed = VectorOf<int16_t, n>::type;
  // Bytes as the upper halves of 16 bits. GCC 12 converts bytes one by one.
#if defined(__ARM_NEON)
  const auto wide = bits_as<Halves>(vshll_n_u8(load<uint8x8_t>(p), 8));
#elif defined(__AVX512F__)
  const auto wide = bits_as<Halves>(_mm512_cvtepu8_epi16(load<__m256i>(p))) << 8;
#elif defined(__F16C__)
  const auto wide = bits_as<Halves>(_mm256_cvtepu8_epi16(load<__m128i>(p))) << 8;
#else
  const auto wide = __builtin_convertvector(load<VectorOf<uint8_t, n>::type>(p), Halves) << 8;
#endif
  Halves h = bits_as<Halves>(bits_as<Signed>(wide) >> 1) & 0xbfff;
  h = (h & 0x3f80) == 0x3f80 ? h | 0x7c00 : h;
  HalfVec halves[2];
  __builtin_memcpy(halves, &h, sizeof h);
  *low = widen_fp16(halves[0]) * 256.f;
  *high = widen_fp16(halves[1]) * 256.f;
}

inline void narrow_e4m3(uint8_t* p, Vec<float> v) {
  const auto u = bits_as<Vec<uint32_t>>(v);
  auto size = bits_as<Vec<float>>(u & 0x7fffffff);
  size = size > 448.f ? splat(448.f) : size;
  const auto bits = bits_as<Vec<uint32_t>>(size);
  const auto normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 120 * 8;
  const auto small = bits_as<Vec<uint32_t>>(size + 0x1p14f) - bits_as<uint32_t>(0x1p14f);
  auto magnitude = size < 0x1p-6f ? small : normal;
  magnitude = v == v ? magnitude : (magnitude & 0) + kNanE4m3;
  const auto result = magnitude | (u >> 24 & 0x80);
#if defined(__ARM_NEON)
  const uint16x4_t half = vmovn_u32(result);
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(half, half));
  store(p, vget_lane_u32(vreinterpret_u32_u8(bytes), 0));
#elif defined(__AVX512F__)
  store(p, _mm512_cvtepi32_epi8(bits_as<__m512i>(result)));
#else
  store(p, __builtin_convertvector(result, VectorOf<uint8_t, kLanes<float>>::type));
#endif
}

}  // namespace
}  // namespace flashmoe::cpu
