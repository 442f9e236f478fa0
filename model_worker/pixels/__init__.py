"""Images from descriptions: pipelines of diffusers, advanced by one denoising step at a time for many images."""
