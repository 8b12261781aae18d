#include "cuda/attention/catalogue.h"

#include <string>
#include <unordered_map>

#include "core/text.h"
#include "cuda/attention/kernels/fp32.h"
#include "cuda/attention/kernels/hopper_rows.h"
#include "cuda/attention/kernels/paged.h"
#include "cuda/attention/kernels/paged_chunk.h"
#include "cuda/attention/kernels/sm75.h"
#include "cuda/attention/kernels/sm80.h"
#include "cuda/attention/kernels/sm90.h"
#include "cuda/attention/second/params.h"
#include "cuda/attention/tiles.h"
#include "cuda/runtime/images.h"

namespace flashmoe::cuda {
namespace {

// Whether kernels of that role have room for a tile of bias in shared memory.
bool has_bias(Role role) {
  switch (role) {
    case Role::kForwardBias:
    case Role::kForwardDropout:
    case Role::kBackwardBias:
    case Role::kBackwardDropout:
    case Role::kBackwardBiasDq:
    case Role::kBackwardDropoutDq:
      return true;
    default:
      return false;
  }
}

int shared_bytes(Role role, const FwdTile& tile) { return tile.shared_bytes(has_bias(role)); }
int shared_bytes(Role role, const BwdTile& tile) {
  const bool dq = role == Role::kBackwardDq || role == Role::kBackwardBiasDq ||
                  role == Role::kBackwardDropoutDq;
  return dq ? tile.dq_shared_bytes(has_bias(role)) : tile.shared_bytes(has_bias(role));
}
int shared_bytes(Role, const Fp32FwdTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Fp32BwdTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Fp32BiasSumTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const BiasSumTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Sm90FwdTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Sm90PackedTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Sm90PackedBwdTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Sm90WholeBwdTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Sm90BwdTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Sm90BiasSumTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role, const Sm90ChunkTile& tile) { return tile.shared_bytes(); }
int shared_bytes(Role role, const PagedTile& tile) {
  return role == Role::kPagedCombine || role == Role::kPagedTickets ? 0 : tile.shared_bytes();
}

// The parameter of a kernel with a tile.
const char* params_type(const FwdTile&) { return "AttentionFwdParams"; }
const char* params_type(const BwdTile&) { return "AttentionBwdParams"; }
const char* params_type(const Fp32FwdTile&) { return "AttentionFwdParams"; }
const char* params_type(const Fp32BwdTile&) { return "AttentionBwdParams"; }
const char* params_type(const Fp32BiasSumTile&) { return "AttentionBwdParams"; }
const char* params_type(const BiasSumTile&) { return "AttentionBwdParams"; }
const char* params_type(const Sm90FwdTile&) { return "Sm90FwdParams"; }
const char* params_type(const Sm90PackedTile&) { return "Sm90PackedParams"; }
const char* params_type(const Sm90PackedBwdTile&) { return "Sm90PackedBwdParams"; }
const char* params_type(const Sm90WholeBwdTile&) { return "Sm90WholeBwdParams"; }
const char* params_type(const Sm90BwdTile&) { return "Sm90BwdParams"; }
const char* params_type(const Sm90BiasSumTile&) { return "Sm90BwdParams"; }
const char* params_type(const PagedTile&) { return "PagedParams"; }
const char* params_type(const Sm90ChunkTile&) { return "Sm90PagedParams"; }

// A sum for each warp.
constexpr int kSinkSumSharedBytes = kRowThreads / 32 * sizeof(float);

// Lists kernels, as far as this build has an image of theirs.
class Lister {
 public:
  std::vector<Kernel> take() { return std::move(list_); }

  // The rows of a table, for each dtype: sm80_attention_NAME_fp16_d64_128x128 and so on, which are
  // in the images sm80_attention_IMAGE_fp16_d64.
  template <class Tile, size_t kRows>
  void add(const char* family, std::initializer_list<DType> dtypes, Role role, const char* name,
           const char* image, const Tile (&table)[kRows]) {
    for (const DType dtype : dtypes) {
      for (size_t row = 0; row < kRows; ++row) {
        add(family, dtype, dtype_suffix(dtype), role, name, image, table[row],
            runs_on_hopper(table, row, has_bias(role)));
      }
    }
  }

  // The tables of fp32, by what names end with: "fp32", or "tf32".
  template <class Fwd, class Bwd, class BiasSum>
  void add_fp32(const char* family, const char* suffix, const Fwd& fwd, const Bwd& bwd,
                const BiasSum& bias_sum) {
    const auto add_table = [&](Role role, const char* name, const char* image, const auto& table) {
      for (const auto& tile : table) {
        add(family, DType::kFloat32, suffix, role, name, image, tile, true);
      }
    };
    add_table(Role::kForward, "fwd", "fwd", fwd);
    add_table(Role::kForwardBias, "fwd_bias", "fwd_bias", fwd);
    add_table(Role::kBackward, "bwd", "bwd", bwd);
    add_table(Role::kBackwardDq, "bwd_dq", "bwd", bwd);
    add_table(Role::kBackwardBias, "bwd_bias", "bwd_bias", bwd);
    add_table(Role::kBackwardBiasDq, "bwd_bias_dq", "bwd_bias", bwd);
    add_table(Role::kBiasSum, "bwd_bias_sum", "bwd_bias", bias_sum);
  }

  // Kernels without a tile, all of them in one image.
  void add_small(const char* family, std::initializer_list<DType> dtypes,
                 std::initializer_list<Role> roles) {
    for (const DType dtype : dtypes) {
      for (const Role role : roles) {
        const std::string name = text(family, "_", role_name(role), "_", dtype_suffix(dtype));
        const std::string image = text(family, "_attention_small_", dtype_suffix(dtype));
        const bool converts = role == Role::kBackwardDq || role == Role::kKeySum;
        const bool bounds = role == Role::kRowBounds || role == Role::kPackedPreprocess;
        const bool sequences = role == Role::kRaggedBlocks || bounds;
        const int threads = sequences ? kRaggedThreads : kRowThreads;
        const int shared_bytes = role == Role::kRaggedBlocks    ? kRaggedSharedBytes
                                 : bounds                       ? kRowBoundsSharedBytes
                                 : role == Role::kBiasTranspose ? kBiasTransposeSharedBytes
                                 : converts                     ? kConvertDqSharedBytes
                                 : role == Role::kSinkSum       ? kSinkSumSharedBytes
                                                                : 0;
        add({embedded_kernel(image, name, name), family, role, dtype, 0, 0, 0, threads,
             shared_bytes, 0});
      }
    }
  }

  // Forward mode and second derivatives: kernels for every head dim, all of them in one image.
  void add_second(const char* family, std::initializer_list<DType> dtypes) {
    for (const DType dtype : dtypes) {
      const std::string image = text(family, "_attention_second_", dtype_suffix(dtype));
      for (const Role role : {Role::kTangent, Role::kSecondRows, Role::kSecondQueries,
                              Role::kSecondKeys, Role::kSecondBiasSum, Role::kSecondSinks}) {
        const std::string name = text(family, "_", role_name(role), "_", dtype_suffix(dtype));
        const KernelId id = embedded_kernel(image, name, name);
        if (role == Role::kSecondRows || role == Role::kSecondSinks) {
          const int shared_bytes = role == Role::kSecondSinks ? kSecondSinksSharedBytes : 0;
          add({id, family, role, dtype, 0, 0, 0, kRowThreads, shared_bytes, 0});
        } else {
          // Tensor cores of sm80 multiply 16 bits as they are.
          const bool halves = std::string_view(family) == "sm80" && dtype != DType::kFloat32;
          const int bytes = halves ? 2 : 4;
          add({id, family, role, dtype, 0, kSecondRows, kSecondRows, kSecondThreads,
               second_shared_bytes(bytes), second_ctas(bytes, role == Role::kSecondKeys)});
        }
      }
    }
  }

 private:
  // The symbol of NAME<head_dim, block_q, block_k>(flashmoe::cuda::PARAMS) by the Itanium C++ ABI,
  // which nvcc follows too.
  template <class Tile>
  static std::string symbol_of(const std::string& name, const Tile& tile) {
    const std::string params = params_type(tile);
    return text("_Z", name.size(), name, "ILi", tile.head_dim, "ELi", tile.block_q, "ELi",
                tile.block_k, "EEvN8flashmoe4cuda", params.size(), params, "E");
  }

  template <class Tile>
  void add(const char* family, DType dtype, const char* suffix, Role role, const char* name,
           const char* image, const Tile& tile, bool on_hopper) {
    const std::string stem = text(family, "_attention_", name, "_", suffix);
    const std::string full = text(stem, "_d", tile.head_dim, "_", tile.block_q, "x", tile.block_k);
    const std::string images = text(family, "_attention_", image, "_", suffix, "_d", tile.head_dim);
    Kernel kernel{embedded_kernel(images, full, symbol_of(stem, tile), on_hopper),
                  family,
                  role,
                  dtype,
                  tile.head_dim,
                  tile.block_q,
                  tile.block_k,
                  tile.threads(),
                  shared_bytes(role, tile),
                  tile.ctas};
    if constexpr (requires { tile.bias_ctas; }) {
      if (has_bias(role)) kernel.ctas = tile.bias_ctas;
    }
    if constexpr (requires { tile.for_short(); }) kernel.for_short = tile.for_short();
    if constexpr (requires { tile.general_score; }) kernel.general_score = tile.general_score;
    if constexpr (requires { tile.cluster(); }) kernel.cluster = tile.cluster();
    kernel.dq_accum_dim = tile.head_dim;
    if constexpr (requires { tile.dq_accum_dim(); }) kernel.dq_accum_dim = tile.dq_accum_dim();
    if constexpr (requires { tile.key_box(); }) kernel.key_box = tile.key_box();
    if constexpr (requires { tile.small_dim(); }) kernel.stores_dq = tile.small_dim();
    if constexpr (requires { Tile::kWhole; }) kernel.whole = kernel.stores_dq = true;
    if constexpr (requires { tile.converts_dq(); }) kernel.converts_dq = tile.converts_dq();
    if constexpr (requires { tile.bias; }) kernel.bias_input = tile.bias;
    if constexpr (requires { tile.teams(); }) {
      kernel.teams = tile.teams();
      kernel.bias_keys = tile.bias_tiles * tile.block_k;
    }
    if constexpr (requires { Tile::kPacked; }) {
      kernel.packed = Tile::kPacked;
      kernel.heads_of_box = tile.heads();
    }
    if constexpr (requires { Tile::kCountsTasks; }) kernel.counts_tasks = Tile::kCountsTasks;
    kernel.tf32 = std::string_view(suffix) == "tf32";
    if constexpr (requires { tile.key_parts(); }) {
      kernel.makes_dq = true;
      kernel.key_parts = tile.key_parts();
    }
    if constexpr (requires { tile.cache_bytes; }) kernel.cache_bytes = tile.cache_bytes;
    if constexpr (requires { tile.whole_rows; }) kernel.whole_rows = tile.whole_rows;
    if (role == Role::kPagedTickets) kernel.threads = kPagedTicketThreads;
    if (role == Role::kPagedCombine) kernel.threads = kPagedCombineThreads;
    add(kernel);
  }

  void add(const Kernel& kernel) {
    if (kernel.id.image) list_.push_back(kernel);
  }

  std::vector<Kernel> list_;
};

std::vector<Kernel> list_kernels() {
  const std::initializer_list<DType> fp16 = {DType::kFloat16};
  const std::initializer_list<DType> both = {DType::kFloat16, DType::kBFloat16};
  Lister list;
  list.add("sm90", both, Role::kForward, "fwd_packed", "fwd_packed", sm90::kFwdPacked);
  list.add("sm90", both, Role::kForwardBias, "fwd_packed_bias", "fwd_packed_bias",
           sm90::kFwdPackedBias);
  list.add("sm90", both, Role::kForward, "fwd", "fwd", sm90::kFwd);
  list.add("sm90", both, Role::kForward, "fwd_general", "fwd", sm90::kFwdGeneral);
  list.add("sm90", both, Role::kForwardBias, "fwd_bias", "fwd_bias", sm90::kFwdBias);
  list.add("sm90", both, Role::kForwardBias, "fwd_bias_rows", "fwd_bias_rows", sm90::kFwdBiasRows);
  list.add("sm90", both, Role::kForwardBias, "fwd_bias_float", "fwd_bias_rows",
           sm90::kFwdBiasFloat);
  list.add("sm90", both, Role::kForwardBias, "fwd_mask", "fwd_mask", sm90::kFwdMask);
  list.add("sm90", both, Role::kBackward, "bwd_packed", "bwd_packed", sm90::kBwdPacked);
  list.add("sm90", both, Role::kBackwardBias, "bwd_packed_bias", "bwd_packed_bias",
           sm90::kBwdPackedBias);
  list.add("sm90", both, Role::kBackward, "bwd_whole", "bwd_whole", sm90::kBwdWhole);
  list.add("sm90", both, Role::kBackward, "bwd", "bwd", sm90::kBwd);
  list.add("sm90", both, Role::kBackward, "bwd_general", "bwd", sm90::kBwdGeneral);
  list.add("sm90", both, Role::kBackwardBias, "bwd_bias", "bwd_bias", sm90::kBwdBias);
  list.add("sm90", both, Role::kBackwardBias, "bwd_bias_rows", "bwd_bias_rows", sm90::kBwdBiasRows);
  list.add("sm90", both, Role::kBackwardBias, "bwd_bias_float", "bwd_bias_rows",
           sm90::kBwdBiasFloat);
  list.add("sm90", both, Role::kBackwardBias, "bwd_mask", "bwd_mask", sm90::kBwdMask);
  list.add("sm90", both, Role::kBiasSum, "bwd_bias_sum", "bwd_bias", sm90::kBiasSum);
  list.add_small("sm90", both,
                 {Role::kRaggedBlocks, Role::kRowBounds, Role::kTaskCounter, Role::kBiasAlign,
                  Role::kPreprocess, Role::kPackedPreprocess, Role::kBackwardDq, Role::kKeySum,
                  Role::kSinkSum});

  const auto add_mma_sync = [&](const char* family, const std::initializer_list<DType>& dtypes,
                                const auto& fwd, const auto& fwd_bias, const auto& fwd_dropout,
                                const auto& bwd, const auto& bwd_bias, const auto& bwd_dropout,
                                const auto& bias_sum) {
    list.add(family, dtypes, Role::kForward, "fwd", "fwd", fwd);
    list.add(family, dtypes, Role::kForwardBias, "fwd_bias", "fwd_bias", fwd_bias);
    list.add(family, dtypes, Role::kForwardDropout, "fwd_dropout", "fwd_dropout", fwd_dropout);
    list.add(family, dtypes, Role::kBackward, "bwd", "bwd", bwd);
    list.add(family, dtypes, Role::kBackwardDq, "bwd_dq", "bwd", bwd);
    list.add(family, dtypes, Role::kBackwardBias, "bwd_bias", "bwd_bias", bwd_bias);
    list.add(family, dtypes, Role::kBackwardBiasDq, "bwd_bias_dq", "bwd_bias", bwd_bias);
    list.add(family, dtypes, Role::kBackwardDropout, "bwd_dropout", "bwd_dropout", bwd_dropout);
    list.add(family, dtypes, Role::kBackwardDropoutDq, "bwd_dropout_dq", "bwd_dropout",
             bwd_dropout);
    list.add(family, dtypes, Role::kBiasSum, "bwd_bias_sum", "bwd_bias", bias_sum);
    list.add_small(family, dtypes,
                   {Role::kCombine, Role::kPreprocess, Role::kRaggedBlocks, Role::kBiasAlign,
                    Role::kBiasTranspose, Role::kSinkSum});
  };
  const auto add_paged = [&](const char* family, const std::initializer_list<DType>& dtypes,
                             const auto& decode, const auto& decode_fp8, const auto& paged,
                             const auto& paged_fp8) {
    list.add(family, dtypes, Role::kPagedDecode, "paged_decode", "paged", decode);
    list.add(family, dtypes, Role::kPagedDecode, "paged_decode_fp8", "paged_fp8", decode_fp8);
    list.add(family, dtypes, Role::kPaged, "paged", "paged", paged);
    list.add(family, dtypes, Role::kPaged, "paged_fp8", "paged_fp8", paged_fp8);
    list.add(family, dtypes, Role::kPagedTickets, "paged_tickets", "paged", paged);
    list.add(family, dtypes, Role::kPagedCombine, "paged_combine", "paged", paged);
  };
  add_mma_sync("sm80", both, sm80::kFwd, sm80::kFwdBias, sm80::kFwdDropout, sm80::kBwd,
               sm80::kBwdBias, sm80::kBwdDropout, sm80::kBiasSum);
  add_mma_sync("sm75", fp16, sm75::kFwd, sm75::kFwdBias, sm75::kFwdDropout, sm75::kBwd,
               sm75::kBwdBias, sm75::kBwdDropout, sm75::kBiasSum);
  const std::initializer_list<DType> fp32 = {DType::kFloat32};
  const auto small = {Role::kPreprocess, Role::kRaggedBlocks, Role::kSinkSum};
  list.add_fp32("sm80", "fp32", sm80::fp32::kFwd, sm80::fp32::kBwd, sm80::fp32::kBiasSum);
  list.add_fp32("sm80", "tf32", sm80::tf32::kFwd, sm80::tf32::kBwd, sm80::tf32::kBiasSum);
  list.add_small("sm80", fp32, small);
  list.add_fp32("sm75", "fp32", sm75::fp32::kFwd, sm75::fp32::kBwd, sm75::fp32::kBiasSum);
  list.add_small("sm75", fp32, small);
  list.add("sm90", both, Role::kPagedChunk, "paged_chunk_rows", "paged_chunk",
           sm90::kPagedChunkRows);
  list.add("sm90", both, Role::kPagedChunk, "paged_chunk", "paged_chunk", sm90::kPagedChunk);
  list.add("sm90", both, Role::kPagedChunk, "paged_chunk_fp8", "paged_chunk_fp8",
           sm90::kPagedChunkFp8);
  add_paged("sm90", both, sm90::kPagedDecode, sm90::kPagedDecodeFp8, sm90::kPaged, sm90::kPagedFp8);
  add_paged("sm80", both, sm80::kPagedDecode, sm80::kPagedDecodeFp8, sm80::kPaged, sm80::kPagedFp8);
  add_paged("sm75", fp16, sm75::kPagedDecode, sm75::kPagedDecodeFp8, sm75::kPaged, sm75::kPagedFp8);
  list.add_second("sm80", {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  list.add_second("sm75", {DType::kFloat32, DType::kFloat16});
  return list.take();
}

}  // namespace

const char* role_name(Role role) {
  switch (role) {
    case Role::kRaggedBlocks:
      return "attention_ragged_blocks";
    case Role::kRowBounds:
      return "attention_row_bounds";
    case Role::kTaskCounter:
      return "attention_task_counter";
    case Role::kBiasAlign:
      return "attention_bias_align";
    case Role::kBiasTranspose:
      return "attention_bias_transpose";
    case Role::kForward:
      return "attention_fwd";
    case Role::kForwardBias:
      return "attention_fwd_bias";
    case Role::kForwardDropout:
      return "attention_fwd_dropout";
    case Role::kCombine:
      return "attention_combine";
    case Role::kPreprocess:
      return "attention_bwd_preprocess";
    case Role::kPackedPreprocess:
      return "attention_bwd_packed_preprocess";
    case Role::kBackward:
      return "attention_bwd";
    case Role::kBackwardBias:
      return "attention_bwd_bias";
    case Role::kBackwardDropout:
      return "attention_bwd_dropout";
    case Role::kKeySum:
      return "attention_bwd_key_sum";
    case Role::kBiasSum:
      return "attention_bwd_bias_sum";
    case Role::kSinkSum:
      return "attention_bwd_sinks";
    case Role::kBackwardDq:
      return "attention_bwd_dq";
    case Role::kBackwardBiasDq:
      return "attention_bwd_bias_dq";
    case Role::kBackwardDropoutDq:
      return "attention_bwd_dropout_dq";
    case Role::kPagedDecode:
      return "attention_paged_decode";
    case Role::kPaged:
      return "attention_paged";
    case Role::kPagedChunk:
      return "attention_paged_chunk";
    case Role::kPagedTickets:
      return "attention_paged_tickets";
    case Role::kPagedCombine:
      return "attention_paged_combine";
    case Role::kTangent:
      return "attention_tangent";
    case Role::kSecondRows:
      return "attention_second_rows";
    case Role::kSecondQueries:
      return "attention_second_queries";
    case Role::kSecondKeys:
      return "attention_second_keys";
    case Role::kSecondBiasSum:
      return "attention_second_bias_sum";
    case Role::kSecondSinks:
      return "attention_second_sinks";
  }
  return "";
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = list_kernels();
  return all;
}

const Kernel* find_kernel(std::string_view name) {
  static const std::unordered_map<std::string_view, const Kernel*> by_name = [] {
    std::unordered_map<std::string_view, const Kernel*> map;
    for (const Kernel& kernel : kernels()) map[kernel.id.name] = &kernel;
    return map;
  }();
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

const Kernel* find_kernel(Role role, const Kernel& beside) {
  for (const Kernel& kernel : kernels()) {
    const bool same_tile = kernel.block_q == beside.block_q && kernel.block_k == beside.block_k;
    const bool same_cache = role == Role::kPaged && kernel.cache_bytes == beside.cache_bytes;
    const bool any_tile =
        role == Role::kBiasSum || role == Role::kPagedTickets || role == Role::kPagedCombine;
    if (kernel.role == role && kernel.dtype == beside.dtype && kernel.tf32 == beside.tf32 &&
        kernel.head_dim == beside.head_dim && std::string_view(kernel.family) == beside.family &&
        (same_tile || same_cache || any_tile)) {
      return &kernel;
    }
  }
  return nullptr;
}

const Kernel* find_kernel(Role role, std::string_view family, DType dtype) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.role == role && kernel.dtype == dtype && kernel.family == family) return &kernel;
  }
  return nullptr;
}

}  // namespace flashmoe::cuda
