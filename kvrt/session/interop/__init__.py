"""Session files of llama.cpp and prompt caches of mlx-lm."""
