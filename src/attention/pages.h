// Attention over the pages of a cache: whether a problem with `paged` is legal.
#pragma once

#include "flashmoe/attention.h"

namespace flashmoe {

// What check() asks of query, key, value and the table, in place of what it asks of dense ones.
Status check_paged(const AttentionProblem& problem);

}  // namespace flashmoe
