"""Tiny torch models after published code that transformers does not hold: what the examples of such specs build.

Each class has the name, the module paths and the products of the published one; its docstring names the code that it
was written after. Inner models that transformers has are transformers' own. No remote code is run or copied. An
example names its class: `witness = "lab.witnesses.grids:KimiVLForConditionalGeneration"`.
"""
