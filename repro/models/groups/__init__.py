"""Groups of neighbours that share a scale: their quantizer, the weight as it is stored, inputs of layers."""
