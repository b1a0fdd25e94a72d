"""Readers of public trace formats: Azure, BurstGPT, Mooncake, ShareGPT, and vLLM's custom data sets.

source    a file as numbered lines, and the fields of a line with their errors
tables    CSV: Azure, BurstGPT
lines     JSON lines: Mooncake
texts     conversations and prompts as text: ShareGPT, vLLM custom
reading   which format a file has, and the trace that comes out of it
"""
