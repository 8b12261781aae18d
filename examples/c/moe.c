/* Experts in bf16 from C, forward and backward. Expert e multiplies what is positive by e + 1,
 * which is easy to check; the token without an expert gets 0. */
#include <flashmoe/c_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kTokens = 4, kExperts = 3, kWidth = 2, kElements = kTokens * kWidth };

/* bf16 is the upper half of a float, rounded to nearest, ties to even. */
static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static float from_bf16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static void stop_on_error(int code) {
  if (code == FLASH_ATTENTION_OK) return;
  fprintf(stderr, "moe example failed: %s\n", flash_moe_last_error());
  exit(1);
}

static void check(const char* what, double got, double want) {
  if (fabs(got - want) <= 0.01 * (1 + fabs(want))) return;
  fprintf(stderr, "moe example failed: %s is %g and should be %g\n", what, got, want);
  exit(1);
}

int main(void) {
  uint16_t x[kElements], up[kExperts * kWidth * kWidth], down[kExperts * kWidth * kWidth];
  uint16_t out[kElements], pre[kElements], grad_out[kElements], grad_x[kElements];
  const int32_t ids[kTokens] = {2, 0, 1, -1}; /* -1: no expert */
  const float weights[kTokens] = {1, 0.5f, 2, 1};
  int32_t routing[kExperts + 1 + kTokens];
  float grad_weights[kTokens];
  for (int i = 0; i < kElements; ++i) {
    x[i] = to_bf16((float)(i % 3) - 1);
    grad_out[i] = to_bf16(1);
  }
  for (int e = 0; e < kExperts; ++e) { /* up is the identity, down e + 1 times it */
    for (int i = 0; i < kWidth * kWidth; ++i) {
      const float identity = i % (kWidth + 1) == 0;
      up[e * kWidth * kWidth + i] = to_bf16(identity);
      down[e * kWidth * kWidth + i] = to_bf16(identity * (float)(e + 1));
    }
  }

  flash_moe_args args;
  stop_on_error(flash_moe_args_init(&args, sizeof args));
  args.tokens = kTokens;
  args.top_k = 1;
  args.experts = kExperts;
  args.width = args.inner = kWidth;
  args.activation = FLASH_MOE_RELU;
  args.x.data = x;
  args.gate_up.data = up;
  args.down.data = down;
  args.ids.data = (void*)ids;
  args.weights.data = (void*)weights;
  args.out.data = out;
  args.pre.data = pre;
  args.routing = routing;
  stop_on_error(flash_moe_forward_bf16(&args));

  printf("flashmoe %s\ntoken expert    out\n", flash_attention_version());
  for (int t = 0; t < kTokens; ++t) {
    const double factor = ids[t] < 0 ? 0 : weights[t] * (ids[t] + 1);
    printf("%5d %6d %6.3f %6.3f\n", t, ids[t], from_bf16(out[t * kWidth]),
           from_bf16(out[t * kWidth + 1]));
    for (int i = t * kWidth; i < (t + 1) * kWidth; ++i) {
      check("out", from_bf16(out[i]), factor * fmax(from_bf16(x[i]), 0));
    }
  }

  args.grad_out.data = grad_out;
  args.grad_x.data = grad_x; /* the only gradients we want */
  args.grad_weights.data = grad_weights;
  stop_on_error(flash_moe_backward_bf16(&args));
  for (int t = 0; t < kTokens; ++t) {
    double want = 0;
    for (int i = t * kWidth; i < (t + 1) * kWidth; ++i) {
      const int used = ids[t] >= 0 && from_bf16(x[i]) > 0;
      check("grad_x", from_bf16(grad_x[i]), used ? weights[t] * (ids[t] + 1) : 0);
      if (used) want += (ids[t] + 1) * from_bf16(x[i]);
    }
    check("grad_weights", grad_weights[t], want);
  }
  printf("gradients of the tokens and their weights: ok\n");

  args.activation = 17; /* what a mistake looks like */
  if (flash_moe_forward_bf16(&args) != FLASH_ATTENTION_INVALID_ARGUMENT) return 1;
  printf("as it should, this fails: %s\n", flash_moe_last_error());
  return 0;
}
