"""eagle3-ray: train EAGLE-3 drafters on exactly the hidden states that SGLang serves."""
