"""Assembly: blocks, the language model, initial scales, counts, decoding."""
