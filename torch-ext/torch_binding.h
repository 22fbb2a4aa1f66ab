// The ops that torch_binding.cpp registers are declared, with their shapes, in csrc/api.h.
#pragma once

#include "../csrc/api.h"
