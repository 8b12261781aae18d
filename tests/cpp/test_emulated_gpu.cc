// Attention's kernels without a GPU: calls run with a driver that has each launch computed on the
// host (emulator/machine.h), over random problems beside the oracle.
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agreement.h"
#include "emulator/machine.h"
#include "fake_libcuda.h"
#include "plans.h"

fake::Cuda fake_cuda;

namespace {

using namespace testing;
using flashmoe::cuda::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
using flashmoe::cuda::CUlaunchConfig;

// What a kernel is given, by value, whatever it is.
struct alignas(64) Params {
  char bytes[4096];
};

// Runs the kernel of that symbol, which is a function of this program.
void compute(const char* symbol, const CUlaunchConfig& config, const void* params) {
  const auto kernel = reinterpret_cast<void (*)(Params)>(dlsym(RTLD_DEFAULT, symbol));
  CHECK(kernel, symbol, "is not emulated");
  if (!kernel) return;
  // How large they are nobody tells: as much as there is.
  Params copy;
  const iovec to{&copy, sizeof copy}, from{const_cast<void*>(params), sizeof copy};
  CHECK(process_vm_readv(getpid(), &to, 1, &from, 1, 0) > 0);
  emulator::Grid grid{{config.gridDimX, config.gridDimY, config.gridDimZ},
                      static_cast<int>(config.blockDimX),
                      static_cast<int>(config.sharedMemBytes)};
  grid.kernel = symbol + (", " + context);
  for (unsigned int i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      grid.cluster = static_cast<int>(config.attrs[i].value.clusterDim.x);
    }
  }
  emulator::run(grid, [&] { kernel(copy); });
}

// Laid out as kernels want it, with the same numbers: rows begin at multiples of 16 bytes.
void make_addressable(Tensor& tensor) {
  if (!tensor || !flashmoe::needs_copy(tensor.spec(), device_under_test)) return;
  const int rank = tensor.spec().rank;
  Layout layout = dense_layout(rank);
  if (tensor.spec().size(-1) % 8) layout.spacing[rank - 2] = 8;
  Tensor other(tensor.spec().dtype, tensor.shape(), layout);
  other.set(tensor.values());
  tensor = std::move(other);
}
void make_addressable(Case& c) {
  for (Tensor* tensor : {&c.query, &c.key, &c.value, &c.out, &c.grad_out, &c.grad_query,
                         &c.grad_key, &c.grad_value}) {
    make_addressable(*tensor);
  }
}
void make_addressable(SecondCase& c) {
  make_addressable(static_cast<Case&>(c));
  for (Tensor* tensor : {&c.tangent_query, &c.tangent_key, &c.tangent_value, &c.tangent_out}) {
    make_addressable(*tensor);
  }
}

// Whether all kernels are there that run this call (FLASHMOE_EMULATED in CMakeLists.txt).
template <class Case>
bool is_emulated(const Case& c) {
  for (Pass pass : passes_of<Case>) {
    const auto planned = flashmoe::plan(c.problem(pass));
    if (!planned.ok()) return false;
    for (const flashmoe::AttentionLaunch& step : planned.value().launches) {
      const CudaKernel* kernel = find(step.kernel);
      if (!kernel || !dlsym(RTLD_DEFAULT, kernel->symbol.c_str())) return false;
    }
  }
  return true;
}

// Families and dtypes whose kernels of a role are there.
std::vector<std::pair<std::string, DType>> emulated(const std::string& role) {
  std::vector<std::pair<std::string, DType>> all;
  for (const CudaKernel& k : flashmoe::cuda_kernels()) {
    const std::pair one(k.family, k.dtype);
    if (k.role != role || std::find(all.begin(), all.end(), one) != all.end()) continue;
    if (dlsym(RTLD_DEFAULT, k.symbol.c_str())) all.push_back(one);
  }
  return all;
}

CaseRules usual_rules() {
  CaseRules rules;
  rules.head_dims = {1, 8, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256};
  rules.lengths = {0, 1, 7, 31, 64, 65, 128, 129, 200, 333};
  rules.most_products = 1e7;
  return rules;
}

// Hands `check` random problems of GPUs with few multiprocessors, which share out their work as
// large ones do that of large problems. It returns whether it has checked one.
template <class Make, class Check>
void for_random_problems(int usual, int seed, const char* role, const Make& make,
                         const Check& check, CaseRules rules = usual_rules()) {
  fake_cuda.static_shared_bytes = 0;
  fake_cuda.on_launch = compute;
  fake_cuda.compute_capabilities[0] = 90;  // on which the others' kernels run as well
  const auto kinds = emulated(role);
  if (kinds.empty()) return;
  const int wanted = case_count(usual);
  int checked = 0;
  for (int i = 0; checked < wanted && i < 100 * wanted; ++i) {
    Random random(seed + i);
    const auto& [family, dtype] = kinds[i % kinds.size()];
    setenv("FLASHMOE_FAMILY", family.c_str(), 1);
    device_under_test = {.type = flashmoe::DeviceType::kCuda,
                         .compute_capability = std::stoi(family.substr(2)),
                         .multiprocessors = static_cast<int>(uniform(random, 1, 6))};
    rules.dtype = dtype;
    auto c = make(random, rules);
    make_addressable(c);
    if (!is_emulated(c)) continue;
    const Note note("case ", i, " by ", family);
    checked += check(random, c, i);
  }
  CHECK(checked == wanted, "only", checked, "problems have all kernels");
}

}  // namespace

TEST(agrees_with_the_oracle) {
  for_random_problems(45, 1000, "attention_bwd", random_case,
                      [](Random& random, Case& c, int) { return check_case(random, c), true; });
}

// Above head dim 128 two CTAs share keys, whose stages come round only with several tiles of
// queries.
TEST(large_head_dims_agree_with_the_oracle) {
  CaseRules rules;
  rules.head_dims = {160, 192, 256};
  rules.lengths = {100, 200, 333};
  rules.most_products = 5e7;
  for_random_problems(
      6, 6000000, "attention_bwd", random_case,
      [](Random& random, Case& c, int) { return check_case(random, c), true; }, rules);
}

// By the kernel that has all of a head in a cluster. Every other problem has a NaN somewhere.
TEST(whole_heads_agree_with_the_oracle) {
  for_random_problems(16, 4000000, "attention_bwd", random_case,
                      [](Random& random, Case& c, int i) {
                        const auto planned = flashmoe::plan(c.problem(Pass::kBackward));
                        if (planned.value().kernel.find("bwd_whole") == std::string::npos)
                          return false;
                        const bool nan = i % 2 && c.grad_out && !c.sinks;
                        const char* const name = nan ? put_nan(random, c, i) : nullptr;
                        const Note where("NaN in ", name ? name : "nothing");
                        check_case(random, c);
                        return true;
                      });
}

// See test_run.cc. A gradient of out that is missing is zeros to a kernel, and 0 x NaN is NaN; a
// row whose lse is its sink counts as one that sees no key.
TEST(nan_goes_where_it_must_and_no_further) {
  for_random_problems(12, 500000, "attention_bwd", random_case, [](Random& random, Case& c, int i) {
    const char* const name = c.grad_out && !c.sinks ? put_nan(random, c, i) : nullptr;
    if (!name) return false;
    const Note where("NaN in ", name);
    check_case(random, c);
    return true;
  });
}

// With a bias and small head dims a tile has three consumers or four, of which one has dQ. Others
// are done with a task while one that goes the guarded way still reads its dS.
TEST(nan_beside_small_head_dims_and_a_bias) {
  const auto is_meant = [](const Case& c) {
    const int64_t dim = std::max(c.query.spec().size(-1), c.value.spec().size(-1));
    return c.bias && dim <= 32 && c.grad_out && !c.sinks;
  };
  for_random_problems(10, 5000000, "attention_bwd_bias", random_case,
                      [&](Random& random, Case& c, int i) {
                        if (!is_meant(c)) return false;
                        const char* const name = put_nan(random, c, i);
                        const Note where("NaN in ", name ? name : "nothing");
                        check_case(random, c);
                        return true;
                      });
}

TEST(tangents_and_second_derivatives_agree_with_the_oracle) {
  for_random_problems(
      24, 2000000, "attention_second_queries", random_second_case,
      [](Random& random, SecondCase& c, int) { return check_case(random, c), true; });
}

// Such as padding that no loss counts, whose keys all carry a number instead of -inf.
TEST(nothing_comes_from_rows_that_nothing_comes_back_to) {
  for_random_problems(30, 3000000, "attention_bwd", random_case, [](Random& random, Case& c, int) {
    if (!c.bias || is_mask(c.bias) || !c.grad_out) return false;
    const bool half = c.bias.spec().dtype == DType::kFloat16;
    const double level = half ? -60000 : -std::pow(10, uniform(random, 4, 18));
    c.bias.set(changed(random, Values(c.bias.count(), level), chance(random, 0.3) ? 0.01 : 0));
    c.grad_out.set(Values(c.grad_out.count()));
    if (c.grad_lse) c.grad_lse.set(Values(c.grad_lse.count()));
    const Note note(describe(c), " bias of ", level);
    run_pass(c, Pass::kForward, 0, {});
    run_pass(c, Pass::kBackward, 0, {});
    for (const auto& [name, tensor] : c.results(Pass::kBackward)) {
      if (!*tensor) continue;
      const Values values = tensor->values();
      CHECK(std::all_of(values.begin(), values.end(), [](double x) { return x == 0; }), name,
            "is not 0");
    }
    return true;
  });
}

int main(int argc, char** argv) { return run_all(argc, argv); }
