// float16, bfloat16 and float8_e4m3fn to and from double, in portable C++ and rounded once to
// nearest even. For the oracle and the tests, where plainness counts; the kernels have instructions
// for this.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace flashmoe::cpu {

// An IEEE-style 16-bit float: 1 sign bit, then exponent, then mantissa.
template <int kExponentBits, int kMantissaBits>
struct SmallFloat {
  static_assert(1 + kExponentBits + kMantissaBits == 16);
  static constexpr int kMaxExponent =
      (1 << (kExponentBits - 1)) - 1;                    // of a finite number, also the bias
  static constexpr int kMinExponent = 1 - kMaxExponent;  // of a normal number
  static constexpr uint16_t kInfinity = ((1 << kExponentBits) - 1) << kMantissaBits;

  static double to_double(uint16_t bits) {
    const int field = (bits & kInfinity) >> kMantissaBits;
    const int mantissa = bits & ((1 << kMantissaBits) - 1);
    double magnitude = 0;
    if ((bits & kInfinity) == kInfinity) {
      magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN()
                           : std::numeric_limits<double>::infinity();
    } else if (field == 0) {
      magnitude = std::ldexp(mantissa, kMinExponent - kMantissaBits);
    } else {
      magnitude = std::ldexp((1 << kMantissaBits) + mantissa, field - kMaxExponent - kMantissaBits);
    }
    return bits & 0x8000 ? -magnitude : magnitude;
  }

  static uint16_t from_double(double x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return sign | kInfinity | (1 << (kMantissaBits - 1));  // quiet
    x = std::fabs(x);
    const int exponent = std::max(std::ilogb(x), kMinExponent);  // ilogb(0) is far below
    if (exponent > kMaxExponent) return sign | kInfinity;
    // x in units of its last place. Scaling by a power of two is exact, so this rounds once.
    const int units = static_cast<int>(std::nearbyint(std::ldexp(x, kMantissaBits - exponent)));
    // The leading one of a normal number, and a carry out of rounding, add 1 to the exponent field.
    return sign | (((exponent - kMinExponent) << kMantissaBits) + units);
  }
};

using Float16 = SmallFloat<5, 10>;
using BFloat16 = SmallFloat<8, 7>;

// 4 bits of exponent and 3 of mantissa, as in OCP's FP8: the exponent field that would be infinity
// has finite numbers up to 448, and NaN where all bits are set.
struct Float8E4M3 {
  static constexpr int kBias = 7, kMinExponent = 1 - kBias;
  static constexpr double kLargest = 448;
  static constexpr uint8_t kNan = 0x7f;

  static double to_double(uint8_t bits) {
    const int magnitude = bits & 0x7f, field = magnitude >> 3, mantissa = magnitude & 7;
    double x = field == 0 ? std::ldexp(mantissa, kMinExponent - 3)
                          : std::ldexp(8 + mantissa, field - kBias - 3);
    if (magnitude == kNan) x = std::numeric_limits<double>::quiet_NaN();
    return bits & 0x80 ? -x : x;
  }

  // Held within +-448, infinity too.
  static uint8_t from_double(double x) {
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return sign | kNan;
    x = std::min(std::fabs(x), kLargest);
    const int exponent = std::max(std::ilogb(x), kMinExponent);  // ilogb(0) is far below
    const int units = static_cast<int>(std::nearbyint(std::ldexp(x, 3 - exponent)));
    return static_cast<uint8_t>(sign | (((exponent - kMinExponent) << 3) + units));
  }
};

}  // namespace flashmoe::cpu
