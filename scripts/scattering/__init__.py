"""Small networks on wavelet scattering coefficients of images.

- networks: the transform, and a classifier of its coefficients
- train: from a recipe to a trained network
"""
