"""Tests of dflash_trio.text.tool_calls."""
