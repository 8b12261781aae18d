// The C functions of the mixture of experts against the C++ ones they stand for. examples/c shows
// that the header is C.
#include "flashmoe/c_api.h"
#include "moe_cases.h"
#include "testing.h"

using namespace testing;

namespace {

// A problem with everything in it, and the C arguments for the same memory.
struct Call {
  MoeCase c;
  flash_moe_args args;

  explicit Call(DType dtype) {
    Random random(12);
    const auto tensor = [&](DType type, std::vector<int64_t> shape) {
      Tensor t(type, shape);
      t.set(random_values(random, t.count()));
      return t;
    };
    c.activation = Activation::kGeglu;
    c.x = tensor(dtype, {19, 8});
    c.gate_up = tensor(dtype, {3, 10, 8});
    c.down = tensor(dtype, {3, 8, 5});
    c.up_bias = tensor(dtype, {3, 10});
    c.down_bias = tensor(dtype, {3, 8});
    c.ids = Tensor(DType::kInt64, {19, 2});
    Values ids;
    for (int i = 0; i < 38; ++i) ids.push_back(i % 5 - 1);
    c.ids.set(ids);
    c.weights = tensor(DType::kFloat32, {19, 2});
    c.out = tensor(dtype, {19, 8});
    c.pre = tensor(dtype, {38, 2, 5});
    c.routing = Tensor(DType::kInt32, {42});
    c.grad_out = tensor(dtype, {19, 8});
    c.grad_x = tensor(dtype, c.x.shape());
    c.grad_gate_up = tensor(dtype, c.gate_up.shape());
    c.grad_down = tensor(dtype, c.down.shape());
    c.grad_up_bias = tensor(dtype, c.up_bias.shape());
    c.grad_down_bias = tensor(dtype, c.down_bias.shape());
    c.grad_weights = tensor(DType::kFloat32, c.weights.shape());

    CHECK_EQ(flash_moe_args_init(&args, sizeof args), FLASH_ATTENTION_OK);
    args.tokens = 19;
    args.top_k = 2;
    args.experts = 3;
    args.width = 8;
    args.inner = 5;
    args.activation = FLASH_MOE_GEGLU;
    args.ids_dtype = FLASH_MOE_IDS_INT64;
    args.x.data = c.x.data();
    args.gate_up.data = c.gate_up.data();
    args.down.data = c.down.data();
    args.up_bias.data = c.up_bias.data();
    args.down_bias.data = c.down_bias.data();
    args.ids.data = c.ids.data();
    args.weights.data = c.weights.data();
    args.out.data = c.out.data();
    args.pre.data = c.pre.data();
    args.routing = static_cast<int32_t*>(c.routing.data());
    args.grad_out.data = c.grad_out.data();
    args.grad_x.data = c.grad_x.data();
    args.grad_gate_up.data = c.grad_gate_up.data();
    args.grad_down.data = c.grad_down.data();
    args.grad_up_bias.data = c.grad_up_bias.data();
    args.grad_down_bias.data = c.grad_down_bias.data();
    args.grad_weights.data = c.grad_weights.data();
  }
};

int run_c(const Call& call, DType dtype, Pass pass) {
  const bool half = dtype == DType::kFloat16;
  if (pass == Pass::kForward) {
    return half ? flash_moe_forward_fp16(&call.args) : flash_moe_forward_bf16(&call.args);
  }
  return half ? flash_moe_backward_fp16(&call.args) : flash_moe_backward_bf16(&call.args);
}

void run_cpp(const MoeCase& c, Pass pass) {
  const auto plan = flashmoe::plan(c.problem(pass, 0));
  CHECK(plan.ok(), plan.status().message());
  std::vector<std::byte> workspace(plan.value().workspace_bytes);
  const flashmoe::Status status = flashmoe::run(plan.value(), c.tensors(), workspace.data());
  CHECK(status.ok(), status.message());
}

std::vector<Values> results(MoeCase& c, Pass pass) {
  std::vector<Values> all;
  for (auto& [name, tensor] : c.results(pass)) {
    all.push_back(tensor->values());
    if (pass == Pass::kForward && tensor != &c.out) {  // rows without an expert hold anything
      const size_t used = tensor == &c.pre ? 10 * 22 : 4 + 22;
      all.back().resize(std::min(all.back().size(), used));
    }
  }
  return all;
}

void check_refused(const flash_moe_args& args, const char* said) {
  CHECK_EQ(flash_moe_forward_bf16(&args), FLASH_ATTENTION_INVALID_ARGUMENT);
  CHECK_CONTAINS(flash_moe_last_error(), said);
}

}  // namespace

TEST(same_results_as_cpp) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Call call(dtype);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      CHECK_EQ(run_c(call, dtype, pass), FLASH_ATTENTION_OK);
      CHECK_EQ(std::string(flash_moe_last_error()), std::string());
      const std::vector<Values> from_c = results(call.c, pass);
      run_cpp(call.c, pass);
      CHECK(results(call.c, pass) == from_c);
    }
  }
}

TEST(optional_tensors_may_be_absent) {
  Call call(DType::kBFloat16);
  for (flash_moe_tensor* t :
       {&call.args.up_bias, &call.args.down_bias, &call.args.weights, &call.args.pre,
        &call.args.grad_up_bias, &call.args.grad_down_bias, &call.args.grad_weights}) {
    t->data = nullptr;
  }
  call.args.routing = nullptr;
  CHECK_EQ(flash_moe_forward_bf16(&call.args), FLASH_ATTENTION_OK);
  CHECK_EQ(flash_moe_backward_bf16(&call.args), FLASH_ATTENTION_INVALID_ARGUMENT);
  CHECK_CONTAINS(flash_moe_last_error(), "pre is missing");
}

TEST(strides_and_workspace) {
  Call call(DType::kBFloat16);
  CHECK_EQ(flash_moe_forward_bf16(&call.args), FLASH_ATTENTION_OK);
  const Values want = call.c.out.values();
  // The same weights stored as (experts, width, 2 inner).
  const Values w = call.c.gate_up.values();
  Values turned(w.size());
  for (int e = 0; e < 3; ++e) {
    for (int r = 0; r < 10; ++r) {
      for (int d = 0; d < 8; ++d) turned[(e * 8 + d) * 10 + r] = w[(e * 10 + r) * 8 + d];
    }
  }
  Tensor storage(DType::kBFloat16, {3, 8, 10});
  storage.set(turned);
  call.args.gate_up.data = storage.data();
  const int64_t strides[] = {80, 1, 10};
  std::copy_n(strides, 3, call.args.gate_up.strides);
  uint64_t bytes = 0;
  CHECK_EQ(
      flash_moe_workspace_bytes(&call.args, FLASH_ATTENTION_BF16, FLASH_ATTENTION_FORWARD, &bytes),
      FLASH_ATTENTION_OK);
  alignas(64) static std::byte workspace[1 << 20];
  CHECK(bytes > 0 && bytes <= sizeof workspace);
  call.args.workspace = workspace;
  call.args.workspace_bytes = bytes;
  call.c.out.poison();
  CHECK_EQ(flash_moe_forward_bf16(&call.args), FLASH_ATTENTION_OK);
  CHECK(call.c.out.values() == want);
  call.args.workspace_bytes = bytes - 1;
  check_refused(call.args, "workspace_bytes");
}

TEST(nothing_needs_no_memory) {
  flash_moe_args args;
  CHECK_EQ(flash_moe_args_init(&args, sizeof args), FLASH_ATTENTION_OK);
  CHECK_EQ(flash_moe_forward_fp16(&args), FLASH_ATTENTION_OK);
  int32_t routing = 0;  // (experts + 1 + no pairs)
  args.routing = &routing;
  CHECK_EQ(flash_moe_forward_fp16(&args), FLASH_ATTENTION_OK);
  CHECK_EQ(flash_moe_backward_fp16(&args), FLASH_ATTENTION_OK);
}

TEST(mistakes_are_explained) {
  CHECK_EQ(flash_moe_forward_fp16(nullptr), FLASH_ATTENTION_INVALID_ARGUMENT);
  CHECK_CONTAINS(flash_moe_last_error(), "args is NULL");
  const Call good(DType::kBFloat16);
  flash_moe_args args = good.args;
  args.struct_size = 8;
  check_refused(args, "flash_moe_args_init");
  args = good.args;
  args.activation = 6;
  check_refused(args, "activation is 6");
  args = good.args;
  args.ids_dtype = 2;
  check_refused(args, "ids_dtype is 2");
  args = good.args;
  args.device = -2;
  check_refused(args, "device is -2");
  args = good.args;
  args.x.data = nullptr;
  check_refused(args, "x is null");
  args = good.args;
  args.inner = int64_t{1} << 62;
  check_refused(args, "2^63");
  args = good.args;
  args.experts = INT64_MAX;
  check_refused(args, "2^63");
  args = good.args;
  args.routing = nullptr;
  check_refused(args, "pre is given without routing");
  uint64_t bytes = 0;
  CHECK_EQ(flash_moe_workspace_bytes(&good.args, 7, 0, &bytes), FLASH_ATTENTION_INVALID_ARGUMENT);
  CHECK_CONTAINS(flash_moe_last_error(), "dtype is 7");
}
