// The sm90 family, on the host: what it can do, how a problem is cut, and its launches.
#pragma once

#include <string>

#include "cuda/attention/catalogue.h"
#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// What the sm90 family cannot do of the problem; empty when there is nothing.
std::string missing_on_hopper(const AttentionPlan& plan);

// Why the sm80 family is faster, as measured on an H200; empty where it is not.
std::string slower_on_hopper(const AttentionPlan& plan, int64_t multiprocessors);

// Three warpgroups have 1.2 times the speed of two, on rows that fill both, once there are enough
// blocks of keys: more of these at D = 96, and where a causal mask leaves half of them. This says
// so where a tile of fewer rows is better.
std::string too_large_on_hopper(const AttentionPlan& plan, const Kernel& k);

// Of heads that share their keys, how many share a tile: 2^this. See Sm90FwdParams.
int hopper_pack(const AttentionPlan& plan, int64_t block_q);

// Grid and workspace; of a backward pass the grid alone.
void cut_hopper_forward(AttentionPlan& plan, int64_t multiprocessors);
void cut_hopper_backward(AttentionPlan& plan, int64_t multiprocessors);

Status run_hopper_forward(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
                          const Launch& launch);

// What its backward kernel needs besides.
struct Sm90BwdParams;
Status fill_hopper_backward(Sm90BwdParams& p, const AttentionPlan& plan, const AttentionTensors& t);

}  // namespace flashmoe::cuda
