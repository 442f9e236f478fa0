"""The common path of every dialect: a request becomes contexts, tokens become text."""
