// The types that modules share. No code.

/**
 * An alternative or chosen token: its text, natural log-probability, and bytes.
 * @typedef {{text: string, logprob: number, bytes: number[] | null}} Candidate
 */

/**
 * A token of an answer, with the most probable tokens at its place.
 * @typedef {Candidate & {top: Candidate[]}} Token
 */

/** @typedef {{id: string, name: string, arguments: string}} ToolCall */

/**
 * What was measured of one answer. Times are milliseconds.
 * @typedef {object} Figures
 * @property {string} requestId
 * @property {number} [firstToken]
 * @property {number} [total]
 * @property {number} [thinking]
 * @property {number} [promptTokens]
 * @property {number} [completionTokens]
 * @property {number} [cachedTokens]
 * @property {number} [reasoningTokens]
 * @property {string} [finish]
 * @property {number} [reconnected]
 */

/** A stream that had not ended when the message was stored. @typedef {{requestId: string, lastId: string}} Pending */

/**
 * One message of a conversation, in one of its branches.
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {string} [reasoning]
 * @property {string[]} [images]
 * @property {ToolCall[]} [calls]
 * @property {string} [callId]
 * @property {string} [prefill]
 * @property {Token[]} [tokens]
 * @property {Figures} [figures]
 * @property {Values} [values]
 * @property {Pending} [pending]
 * @property {string} [error]
 * @property {boolean} [running]
 */

/**
 * A tree of messages. `chosen` names, for each message (and for "" above the first), the child that is shown.
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated
 * @property {Record<string, Message>} messages
 * @property {string[]} order
 * @property {Record<string, string>} chosen
 * @property {Values} values
 */

/** The parameters that differ from the server's defaults, by name. @typedef {Record<string, any>} Values */

/** @typedef {{name: string, values: Values}} Preset */

export {};
