"""The scheduler process: admission, order, batching and KV blocks of one served model. No torch, no HTTP."""
