"""Mixers: how tokens read one another. One operator a file: formula and readable reference first, fast form below."""
