StructuredOutputsParams = object
