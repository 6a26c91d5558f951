// A user's program on node-llama-cpp, which knows nothing of ggml-async: greedy text.
// Arguments: folder of node_modules, model, tokens to generate, exit code.
import {pathToFileURL} from "node:url";

const [, , modules, modelPath, length, code] = process.argv;
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(`${modules}/node-llama-cpp/dist/index.js`));
const llama = await getLlama({
    gpu: "vulkan", build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.info,
    logger: (level, message) => process.stderr.write(`[${level}] ${message}\n`)
});
const model = await llama.loadModel({modelPath, gpuLayers: "max"});
const context = await model.createContext({contextSize: 128, batchSize: 64, threads: 2, flashAttention: true});
const tokens = [];
for await (const token of context.getSequence().evaluate(model.tokenize("Hello", true), {temperature: 0})) {
    tokens.push(token);
    if (tokens.length >= Number(length))
        break;
}
console.log(JSON.stringify({gpu: llama.gpu, layers: model.gpuLayers, tokens, text: model.detokenize(tokens)}));
await llama.dispose();
process.exitCode = Number(code);
