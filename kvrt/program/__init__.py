"""What is compiled: the step, the decode loop, sampling, and the programs made of them."""
