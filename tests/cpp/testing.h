// As much of a test framework as we need. A test program is a .cc file of TEST(name) { ... } blocks
// that includes this header; CHECK reports and goes on.
#pragma once

#include <chrono>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

inline int failures = 0;
inline std::string context;  // printed with every failure: which random problem, which target

// For tests that loop over cases: says which one, for as long as it lives.
struct Note {
  template <class... Parts>
  explicit Note(const Parts&... parts) : saved(context) {
    std::ostringstream stream;
    (stream << ... << parts);
    context += (context.empty() ? "" : " | ") + stream.str();
  }
  ~Note() { context = saved; }
  std::string saved;
};

template <class... Parts>
void fail(const char* file, int line, const std::string& what, const Parts&... parts) {
  constexpr int kShown = 10;  // one broken kernel fails thousands of checks
  if (++failures > kShown) return;
  std::ostringstream stream;
  stream.precision(10);
  stream << file << ":" << line << ": " << what;
  ((stream << " " << parts), ...);
  if (!context.empty()) stream << "\n    in " << context;
  std::cout << stream.str() << std::endl;
}

}  // namespace testing

#define TEST(name)                                                         \
  static void name();                                                      \
  [[maybe_unused]] static bool added_##name = ::testing::add(#name, name); \
  static void name()

// CHECK(condition, anything worth printing when it is false...)
#define CHECK(condition, ...)                                                                \
  do {                                                                                       \
    if (!(condition))                                                                        \
      ::testing::fail(__FILE__, __LINE__, "not so: " #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (0)

#define CHECK_EQ(a, b)                                                                          \
  do {                                                                                          \
    const auto value_a = (a);                                                                   \
    const auto value_b = (b);                                                                   \
    if (!(value_a == value_b))                                                                  \
      ::testing::fail(__FILE__, __LINE__, #a " == " #b " is not so:", value_a, "and", value_b); \
  } while (0)

#define CHECK_CONTAINS(whole, part)                                                             \
  do {                                                                                          \
    const std::string value_whole = (whole);                                                    \
    if (value_whole.find(part) == std::string::npos)                                            \
      ::testing::fail(__FILE__, __LINE__, "no \"" + std::string(part) + "\" in:", value_whole); \
  } while (0)

// Runs all tests, or those whose names contain the first argument; with I/N every N-th of them,
// from the I-th on.
namespace testing {
inline bool is_wanted(size_t number, const std::string& wanted) {
  int first = 0, step = 0;
  if (std::sscanf(wanted.c_str(), "%d/%d", &first, &step) == 2 && step > 0) {
    return static_cast<int>(number) % step == first;
  }
  return std::string(tests()[number].name).find(wanted) != std::string::npos;
}
inline int run_all(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  for (size_t i = 0; i < tests().size(); ++i) {
    if (!is_wanted(i, wanted)) continue;
    const Test& test = tests()[i];
    const int before = failures;
    const auto start = std::chrono::steady_clock::now();
    test.body();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%-6s %s (%.2f s)\n", failures == before ? "ok" : "FAILED", test.name,
                seconds.count());
    std::fflush(stdout);
  }
  if (failures) std::printf("%d checks failed\n", failures);
  return failures ? 1 : 0;
}
}  // namespace testing

#ifndef TESTING_OWN_MAIN
int main(int argc, char** argv) { return testing::run_all(argc, argv); }
#endif
