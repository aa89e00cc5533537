"""Families of decoders, a file each: how a header is read, and what files call the tensors."""
