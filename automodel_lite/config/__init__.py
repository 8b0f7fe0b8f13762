"""The configuration: its schema, the check of it, and the objects that its blocks describe.

Knows: keys, types, defaults, which code a configuration may name. Imports: the ground alone
(errors, thd, flops, seed).
"""
