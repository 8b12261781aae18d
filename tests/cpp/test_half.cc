// 16-bit floats to double and back, for all of them.
#include "cpu/half.h"
#include "testing.h"

using flashmoe::cpu::BFloat16;
using flashmoe::cpu::Float16;

namespace {

template <class Half>
void every_number_survives() {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const double x = Half::to_double(static_cast<uint16_t>(bits));
    const uint16_t back = Half::from_double(x);
    if (std::isnan(x)) {
      CHECK(std::isnan(Half::to_double(back)), bits);
      CHECK_EQ(back & 0x8000, bits & 0x8000);
    } else {
      CHECK_EQ(back, bits);
    }
  }
}

// Between any two neighbours: the middle goes to the even one, anything beside the middle to the
// nearer. The step to infinity is a neighbour too: it is as wide as the one before it.
template <class Half>
void rounds_to_nearest_even() {
  for (uint16_t low = 0; low < Half::kInfinity; ++low) {
    const uint16_t high = low + 1;
    const double a = Half::to_double(low);
    const double b = high < Half::kInfinity
                         ? Half::to_double(high)
                         : 2 * a - Half::to_double(static_cast<uint16_t>(low - 1));
    const double middle = (a + b) / 2;
    CHECK_EQ(Half::from_double(middle), low % 2 == 0 ? low : high);
    CHECK_EQ(Half::from_double(std::nextafter(middle, 0)), low);
    CHECK_EQ(Half::from_double(std::nextafter(middle, 1e300)), high);
    CHECK_EQ(Half::from_double(-middle), 0x8000 | (low % 2 == 0 ? low : high));
  }
}

}  // namespace

TEST(float16_survives) { every_number_survives<Float16>(); }
TEST(bfloat16_survives) { every_number_survives<BFloat16>(); }
TEST(float16_rounds) { rounds_to_nearest_even<Float16>(); }
TEST(bfloat16_rounds) { rounds_to_nearest_even<BFloat16>(); }

TEST(known_numbers) {
  CHECK_EQ(Float16::from_double(1), 0x3c00);
  CHECK_EQ(Float16::from_double(65504), 0x7bff);
  CHECK_EQ(Float16::from_double(0x1p-24), 0x0001);
  CHECK_EQ(Float16::from_double(1e300), 0x7c00);
  CHECK_EQ(Float16::from_double(-0.0), 0x8000);
  CHECK_EQ(Float16::from_double(5e-324), 0);
  CHECK_EQ(BFloat16::from_double(1), 0x3f80);
  CHECK_EQ(BFloat16::from_double(-std::numeric_limits<double>::infinity()), 0xff80);
  CHECK_EQ(BFloat16::to_double(0x4049), 3.140625);
  // By way of float this would first round to the middle and then to even, 1.
  CHECK_EQ(Float16::from_double(1 + 0x1p-11 + 0x1p-40), 0x3c01);
}
