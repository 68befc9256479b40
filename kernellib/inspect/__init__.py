# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of an operator: resources, gfx950 listing, linked code object.

python -m kernellib.inspect OPERATOR [--config NAME] [--emit asm|object] [--out FILE]
"""
