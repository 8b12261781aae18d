// The tables of all operators, of one instruction set.
#include "cpu/attention/kernels.h"
#include "cpu/cache/kernels.h"
#include "cpu/moe/kernels.h"

#define FLASHMOE_STRING_(a) #a
#define FLASHMOE_STRING(a) FLASHMOE_STRING_(a)

namespace flashmoe::cpu {

extern const Arithmetics<Kernels> FLASHMOE_OF_TARGET(attention);
extern const Arithmetics<cache::Kernels> FLASHMOE_OF_TARGET(cache);
extern const Arithmetics<moe::Kernels> FLASHMOE_OF_TARGET(moe);

extern const Target FLASHMOE_OF_TARGET(target);
const Target FLASHMOE_OF_TARGET(target) = {FLASHMOE_STRING(FLASHMOE_CPU_TARGET),
                                           &FLASHMOE_OF_TARGET(attention),
                                           &FLASHMOE_OF_TARGET(cache), &FLASHMOE_OF_TARGET(moe)};

}  // namespace flashmoe::cpu
