/* Causal attention in bf16 from C, forward and backward. All queries are 0, so every key a row sees
 * gets the same weight: row i of the result is the mean of the values 0 .. i, which is easy to
 * check. */
#include <flashmoe/c_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kLength = 6, kDim = 4, kElements = kLength * kDim };

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
  fprintf(stderr, "attention example failed: %s\n", flash_attention_last_error());
  exit(1);
}

static void check(const char* what, double got, double want) {
  if (fabs(got - want) <= 0.01 * (1 + fabs(want))) return;
  fprintf(stderr, "attention example failed: %s is %g and should be %g\n", what, got, want);
  exit(1);
}

int main(void) {
  uint16_t query[kElements], key[kElements], value[kElements], out[kElements];
  uint16_t grad_out[kElements], grad_value[kElements];
  float lse[kLength];
  for (int i = 0; i < kElements; ++i) {
    query[i] = 0;
    key[i] = to_bf16((float)(i % 7) - 3);
    value[i] = to_bf16((float)(i / kDim)); /* row j holds j */
    grad_out[i] = to_bf16(1);
  }

  flash_attention_args args;
  stop_on_error(flash_attention_args_init(&args, sizeof args));
  args.batch = args.heads_q = args.heads_k = 1;
  args.len_q = args.len_k = kLength;
  args.head_dim = args.head_dim_v = kDim;
  args.query.data = query;
  args.key.data = key;
  args.value.data = value;
  args.out.data = out;
  args.lse.data = lse;
  args.causal = 1;
  stop_on_error(flash_attention_forward_bf16(&args));

  printf("flashmoe %s\nrow    out   exp(lse)\n", flash_attention_version());
  for (int i = 0; i < kLength; ++i) {
    printf("%3d %6.3f %10.3f\n", i, from_bf16(out[i * kDim]), exp(lse[i]));
    check("out", from_bf16(out[i * kDim]), i / 2.0);
    check("exp(lse)", exp(lse[i]), i + 1); /* keys seen */
  }

  args.grad_out.data = grad_out;
  args.grad_value.data = grad_value; /* the only gradient we want */
  stop_on_error(flash_attention_backward_bf16(&args));
  for (int j = 0; j < kLength; ++j) {
    double want = 0; /* value j is seen by rows j, j + 1, ... with weight 1 / (row + 1) */
    for (int i = j; i < kLength; ++i) want += 1.0 / (i + 1);
    check("grad_value", from_bf16(grad_value[j * kDim]), want);
  }
  printf("gradient of the values: ok\n");

  args.window_left = -5; /* what a mistake looks like */
  if (flash_attention_forward_bf16(&args) != FLASH_ATTENTION_INVALID_ARGUMENT) return 1;
  printf("as it should, this fails: %s\n", flash_attention_last_error());
  return 0;
}
