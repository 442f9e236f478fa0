import{d as h,h as $,n as y,p as S,s as r}from"./chunk-3QODNAS5.js";import"./chunk-SQE76S5B.js";var I="/v1/images/generations",_=3,w=_+1,M=10,k=4,A=60,D=2**31,l=$([]),c=$(null),u=$({});function f(e,a){l.value=l.value.map(n=>n.id===e?{...n,...a}:n)}async function N({id:e},a,n){try{for await(let{value:s}of y(I,a,{signal:n,requestId:e})){let o=s.type==="image_generation.completed",i=o?w:s.partial_image_index+1;if(f(e,{url:`data:image/png;base64,${s.b64_json}`,size:s.size,parts:i,done:o}),o)return}f(e,{problem:"The answer ended before the picture was done."})}catch(s){f(e,{problem:n.aborted?"Stopped.":s.message})}}async function C(e){let{prompt:a="",size:n="",count:s="1",seed:o="",steps:i="",guidance:t=""}=u.value,p=o===""?Math.floor(Math.random()*D):Number(o),T={model:e,prompt:a,stream:!0,partial_images:_,output_format:"png",...n.trim()&&{size:n.trim()},...i&&{num_inference_steps:Number(i)},...t&&{guidance_scale:Number(t)}},x=Math.min(Math.max(Number(s)||1,1),M),b=Array.from({length:x},(m,E)=>O(a,p+E));l.value=[...b,...l.value].slice(0,A);let g=new AbortController;c.value=g;let v=[...b],z=async()=>{for(let m=v.shift();m;m=v.shift())await N(m,{...T,seed:m.seed},g.signal)};await Promise.all(Array.from({length:k},z)),c.value=null}function O(e,a){return{id:`ui-${crypto.randomUUID?.()??`${Date.now()}-${a}`}`,prompt:e,seed:a,size:"",url:"",parts:0,done:!1,problem:""}}function F(){let e=S.value?.paints??[],[a,n]=h(""),s=e.find(({model:t})=>t===a)??e[0];if(!s)return r`<section class="images" aria-label="Images"><p>No model of this server paints.</p></section>`;let o=()=>{!c.value&&u.value.prompt?.trim()&&C(s.model)},i=t=>{t.key==="Enter"&&!t.shiftKey&&!t.isComposing?(t.preventDefault(),o()):t.key==="Escape"&&c.value?.abort()};return r`<section class="images" aria-label="Images">
    <form onSubmit=${t=>(t.preventDefault(),o())}>
      <label>What the picture shows<textarea rows="3" value=${u.value.prompt??""} onInput=${P("prompt")} onKeyDown=${i}></textarea></label>
      <div class="raw-fields">
        ${e.length>1&&r`<label>Model<select value=${s.model} onChange=${t=>n(t.target.value)}>
            ${e.map(({model:t})=>r`<option value=${t}>${t}</option>`)}
          </select></label>`}
        <${d} name="size" label="Size" type="text" placeholder=${s.size} />
        <${d} name="count" label="Pictures" min="1" max=${M} placeholder="1" />
        <${d} name="seed" label="Seed" min="0" placeholder="random" />
        <${d} name="steps" label="Steps" min="1" placeholder=${s.num_inference_steps} />
        <${d} name="guidance" label="Guidance" min="0" step="any" placeholder=${s.guidance_scale} />
      </div>
      <div class="buttons">
        ${c.value?r`<button key="stop" type="button" class="primary" onClick=${()=>c.value?.abort()}>Stop</button>`:r`<button key="paint" type="submit" class="primary" disabled=${!u.value.prompt?.trim()}>Paint</button>`}
      </div>
    </form>
    <p class="unseen" role="status" aria-live="polite">${R()}</p>
    <div class="pictures">${l.value.map(t=>r`<${K} key=${t.id} picture=${t} />`)}</div>
  </section>`}function R(){let e=l.value.filter(({done:n,problem:s})=>!n&&!s).length;if(e)return e===1?"1 picture is being painted.":`${e} pictures are being painted.`;if(!l.value.length)return"";let a=l.value.filter(({problem:n})=>n).length;return a?`No picture is being painted. ${a} stopped or failed.`:"All pictures are done."}function P(e){return a=>u.value={...u.value,[e]:a.target.value}}function d({name:e,label:a,...n}){return r`<label>${a}<input type="number" ...${n} value=${u.value[e]??""} onInput=${P(e)} /></label>`}function K({picture:e}){let{prompt:a,seed:n,size:s,url:o,parts:i,done:t,problem:p}=e;return r`<figure aria-busy=${!t&&!p}>
    ${o&&r`<img class="made" src=${o} alt=${t?a:`Preview: ${a}`} />`}
    ${!t&&!p&&r`<progress aria-label=${`Progress of seed ${n}`} max=${w} value=${i}></progress>`}
    ${p&&r`<p class="problem" role="alert">${p}</p>`}
    <figcaption>
      ${a} <span class="quiet">${[s,`seed ${n}`].filter(Boolean).join(" \xB7 ")}</span>
      ${t&&r`${" "}<a href=${o} download=${`tokenyard-${n}.png`}>Save</a>`}
    </figcaption>
  </figure>`}export{F as Images};
