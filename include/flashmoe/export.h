// What the library shows: everything else is hidden.
#pragma once

#if defined(__GNUC__)
#define FLASHMOE_API __attribute__((visibility("default")))
#else
#define FLASHMOE_API
#endif
