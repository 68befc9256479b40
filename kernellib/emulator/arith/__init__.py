# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the gfx950 instructions as pure numpy functions.

Arrays in, arrays out: nothing here knows registers, waves, exec masks or operand modifiers. Each function
says in its docstring which published source fixes its behaviour, and says "not published; assumed ..." where
none does. The main source is the document "AMD Instinct CDNA4 Instruction Set Architecture" (cited as CDNA4
ISA).

Modules: `float32` (fused multiply-add, denormals, clamp), `select` (min, max, median, compare, class),
`rounding` (trunc, floor, frexp, ldexp, fract), `transcendental`, `division`, `convert` (float and integer),
`smallfloat` with the formats `bf16`, `fp8`, `fp6`, `fp4`, `e8m0`, `dot`, `integer`, `mfma_layout`, `mfma`.
"""
