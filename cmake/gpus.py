"""Prints the compute capability of each GPU of this machine, one a line: 9.0.

CMake asks it which kernels to compile, tools/environment.py whether a compiler is needed. It asks
the driver: nvidia-smi is missing in many containers, and torch where only the C++ library is built.
"""

import ctypes

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def compute_capabilities() -> list[str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for device in range(count.value):
        numbers = []
        for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
            value = ctypes.c_int(0)
            if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                break
            numbers.append(str(value.value))
        if len(numbers) == 2:
            found.append(".".join(numbers))
    return found


if __name__ == "__main__":
    print("\n".join(compute_capabilities()))
